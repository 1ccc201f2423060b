# SPDX-License-Identifier: Apache-2.0
"""Fixtures of these tests."""

from slurm import slurm

__all__ = ["slurm"]
