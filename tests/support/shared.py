# SPDX-License-Identifier: Apache-2.0
"""Whether tensors lie in shared memory."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

NAME = "memfd:torch_ring"  # as the kernel shows it


def is_shared(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory that the host's ranks share."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return NAME in line
    raise AssertionError("it lies nowhere")
