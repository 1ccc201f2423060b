# SPDX-License-Identifier: Apache-2.0
"""place_of(): the GPU of this process, as NCCL tells the GPUs of a job apart."""

from __future__ import annotations

import torch

from torch_ring.config import nccl_host

__all__ = ["place_of"]

_NONE = "-000000000000"  # end of a UUID of a GPU that has none


def place_of(device_type: str, index: int) -> tuple[str, str]:
    """Return a GPU's host and its UUID.

    Args:
        device_type: "cuda", say, which may be one of AMD's GPUs.
        index: its number in this process.

    Returns:
        Texts that are the same for two ranks if NCCL would find both on one GPU, and refuse them.
        Empty ones if NCCL lets ranks share GPUs, or if the GPU has no UUID.
    """
    properties = getattr(torch.get_device_module(device_type), "get_device_properties", None)
    host = nccl_host()
    uuid = str(getattr(properties(index), "uuid", "")) if properties and host else ""
    return (host, uuid) if uuid and not uuid.endswith(_NONE) else ("", "")
