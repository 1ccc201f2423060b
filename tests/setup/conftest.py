"""Fixtures of these tests."""

from slurm import slurm

__all__ = ["slurm"]
