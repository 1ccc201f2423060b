# SPDX-License-Identifier: Apache-2.0
"""ranks_of: the ranks of a list, a process set or an mpi4py communicator."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable
from typing import Any

from torch_ring.errors import InvalidArgumentError

__all__ = ["Ranks", "ranks_of", "require_below"]

Ranks = tuple[int, ...]
"""Ranks of the world, ascending."""


def ranks_of(group: Any, size: int | None = None) -> Ranks:
    """Return the ranks of `group`.

    Args:
        group: ranks in any order, an object with ``.ranks``, or an mpi4py communicator.
        size: the number of ranks in the world, if known.

    Raises:
        InvalidArgumentError: `group` is empty, or a rank is no integer, negative, repeated or too
            large.
    """
    if hasattr(group, "Get_group"):
        group = _ranks_in_mpi_world(group)
    members = getattr(group, "ranks", group)
    if isinstance(members, (str, bytes)) or not isinstance(members, Iterable):
        raise InvalidArgumentError(f"{group!r} is neither ranks nor an mpi4py communicator")
    try:
        ranks = tuple(sorted(operator.index(rank) for rank in members))
    except TypeError as error:
        raise InvalidArgumentError(f"{group!r} are no ranks: {error}") from None
    if not ranks or ranks[0] < 0 or len(set(ranks)) < len(ranks):
        raise InvalidArgumentError(
            f"{group!r}: at least one rank is needed, none below 0, and none twice"
        )
    if size is not None:
        require_below(ranks, size)
    return ranks


def require_below(ranks: Ranks, size: int) -> None:
    """Raise InvalidArgumentError if one of `ranks` is not below `size`."""
    if ranks[-1] >= size:
        raise InvalidArgumentError(f"{list(ranks)}: the last of {size} ranks is {size - 1}")


def _ranks_in_mpi_world(comm: Any) -> Any:
    mpi = importlib.import_module("mpi4py.MPI")
    if comm == mpi.COMM_NULL:
        raise InvalidArgumentError("COMM_NULL does not say which ranks: give a list of them")
    group = comm.Get_group()
    try:
        return mpi.Group.Translate_ranks(group, None, mpi.COMM_WORLD.Get_group())
    finally:
        group.Free()
