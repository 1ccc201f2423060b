"""Tracing: what the ranks of a job did, and when (docs/timeline.md)."""
