# SPDX-License-Identifier: Apache-2.0
"""empty_shared: tensors in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["empty_shared"]


def empty_shared(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return an uninitialised CPU tensor, like ``torch.empty``, in memory shared within the host.

    An allreduce of it in place (:func:`torch_ring.allreduce_`), or of a contiguous part of it,
    copies nothing: every rank reduces its chunk straight from the others' memory and writes the sum
    there. If one rank's tensor is not shared, the tensors are reduced like any others. Optimizers
    keep their buckets in such memory.

    Without shared memory (one rank, or each rank on a host of its own), or without room in it
    (``ulimit -v``), it is an ordinary tensor. The function is no collective: each
    rank may call it at any time. The memory lives as long as the tensor, even after
    :func:`torch_ring.shutdown`. In a process that is forked from this one the tensor has zeros.

    Args:
        size: the shape: integers, or one sequence of them.
        dtype: the dtype; None: torch's default dtype.
        process_set: the set whose collectives will take the tensor, this rank in it; by default all
            ranks.

    Returns:
        A tensor of that shape and dtype, whose values are undefined.

    Raises:
        NotInitializedError: before :func:`torch_ring.init`.
        InvalidArgumentError: this process is not in the set.
        RingError: the host has no more memory.
    """
    shape: Sequence[Any] = size
    if len(size) == 1 and isinstance(size[0], Sequence):
        shape = size[0]
    engine = engine_of(process_set)
    # torch checks the shape, and raises its own errors.
    shape = torch.empty(tuple(shape), device="meta").shape
    return engine.empty_shared(tuple(shape), dtype or torch.get_default_dtype())
