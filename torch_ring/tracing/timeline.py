"""start_timeline, stop_timeline: a file that shows what all ranks do, for Perfetto."""

from __future__ import annotations

import os

from torch_ring.world import current

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to write what the ranks do into a file that Perfetto and chrome://tracing open.

    A collective: call it on all ranks, which wait for one another. Rank 0 writes the file. A
    timeline that goes on ends, also that of TORCH_RING_TIMELINE.

    Args:
        file_path: of the file, on rank 0's host. A file that exists is replaced. The other ranks
            ignore it.
        mark_cycles: whether each round of agreement is marked: CYCLE_START.

    Raises:
        NotInitializedError: before init().
        InvalidArgumentError: on all ranks: `file_path` is no path on one of them, or rank 0 cannot
            write the file.
        MismatchError: on all ranks: not all of them call this.
    """
    current.require_own()
    world = current.world()
    world.timelines.start(file_path, bool(mark_cycles), world.process_sets.first_failure)


def stop_timeline() -> None:
    """End the timeline, so that its file is complete; on rank 0 those of the other ranks, too.

    Does nothing without one. Waits for other ranks' events for at most 5 s. shutdown() calls it.

    Raises:
        NotInitializedError: before init().
    """
    current.require_own()
    current.world().timelines.stop()
