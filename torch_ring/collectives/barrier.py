# SPDX-License-Identifier: Apache-2.0
"""barrier: ranks wait for one another. join: a rank without data contributes neutral values."""

from __future__ import annotations

from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["barrier", "join"]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the set has called this function.

    Afterwards the running numbers of operations without a name start again on all ranks.

    Args:
        process_set: the ranks that wait for one another, this one among them; by default all.

    Raises:
        RingError: MismatchError (a rank waits for something else), PeerLostError or TimeoutError.
    """
    engine_of(process_set).run("barrier")


def join(device: int = -1) -> int:  # noqa: ARG001
    """Block until every rank has called this function: for ranks that run out of data first.

    Meanwhile this rank contributes zeros to the others' sums, ones to their products, and the
    dtype's largest or smallest value to their minima and maxima; an Average still divides by the
    number of all ranks. Operations that need every rank raise MismatchError on the ranks that call
    them. If the others accumulate into gradients that were averaged with this rank, it contributes
    its own `p.grad`: so before a join in the middle of a step, or without zero_grad(), leave
    `p.grad` as it was averaged. A collective of the global process set.

    Args:
        device: ignored; Horovod's join() has it.

    Returns:
        The last rank that joined.

    Raises:
        RingError: PeerLostError or TimeoutError.
    """
    for callback in current.world().before_join:
        callback()
    last = int(current.engine().join().wait())
    for callback in current.world().on_rejoin:
        callback()
    return last
