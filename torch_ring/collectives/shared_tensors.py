"""Tensors in memory that the ranks of a host share."""

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
    """Return an uninitialised CPU tensor, as ``torch.empty`` does, that the host's ranks can reach.

    An allreduce of it in place (:func:`torch_ring.allreduce_`) copies nothing: every rank reduces
    its part straight from the others' memory and writes the sum there. That holds for a contiguous
    part of one, too. All ranks must have theirs there, else it is reduced as any other.
    Optimizers keep their buckets there.

    Where there is no shared memory (one rank, each on a host of its own), it is an ordinary tensor.
    No collective: each rank may call it when it likes. The memory stays as long as the tensor, also
    after :func:`torch_ring.shutdown`.

    Args:
        size: numbers, or one sequence of them.
        dtype: torch's default dtype if not given.
        process_set: whose collectives it is for; this process must be among its ranks.

    Raises:
        NotInitializedError: before :func:`torch_ring.init`.
        InvalidArgumentError: this process is not in the set.
        RingError: the host has no more memory.
    """
    shape: Sequence[Any] = size
    if len(size) == 1 and isinstance(size[0], Sequence):
        shape = size[0]
    engine = engine_of(process_set)
    # torch checks the shape, and says what is wrong with it.
    shape = torch.empty(tuple(shape), device="meta").shape
    return engine.empty_shared(tuple(shape), dtype or torch.get_default_dtype())
