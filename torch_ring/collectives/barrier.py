"""barrier: ranks wait for one another; join: a rank without data takes part with zeros."""

from __future__ import annotations

from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["barrier", "join"]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the set has called it.

    After it, operations without a name are numbered from the start again on all ranks.
    """
    engine_of(process_set).barrier("", blocking=True).wait()


def join(device: int = -1) -> int:  # noqa: ARG001
    """Take part no more, until every rank has called it: for ranks that run out of data first.

    Meanwhile this rank gives zeros to the others' sums, and ones, or an end of the dtype's range,
    to their products, minima and maxima; an Average still divides by all ranks. Operations that
    need every rank are a MismatchError on the ranks that call them. Of the global process set.

    Args:
        device: ignored; Horovod has it.

    Returns:
        The last rank that joined.
    """
    last = int(current.engine().join().wait())
    for callback in current.world().on_rejoin:
        callback()
    return last
