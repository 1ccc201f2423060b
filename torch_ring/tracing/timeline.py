# SPDX-License-Identifier: Apache-2.0
"""start_timeline, stop_timeline: a file with the operations of all ranks, for Perfetto."""

from __future__ import annotations

import os

from torch_ring.world import current

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to write the ranks' operations to a file for Perfetto or chrome://tracing.

    A collective: call it on all ranks, which wait for one another. Rank 0 writes the file. A
    present timeline ends, even that of TORCH_RING_TIMELINE.

    Args:
        file_path: the path of the file, on rank 0's host. An existing file is replaced. The other
            ranks ignore the path.
        mark_cycles: whether each round of agreement is marked by CYCLE_START.

    Raises:
        NotInitializedError: before init().
        InvalidArgumentError: on all ranks: `file_path` is no path on one of them, or rank 0 cannot
            write the file.
        MismatchError: on all ranks: not all of them call this.
    """
    current.require_own()
    world = current.world()
    world.timelines.start(file_path, bool(mark_cycles), world.process_sets.gather_texts)


def stop_timeline() -> None:
    """End the timeline, and complete its file; rank 0 ends the timelines of all ranks.

    Does nothing without one. Waits for other ranks' events for at most 5 s. shutdown() calls it.

    Raises:
        NotInitializedError: before init().
    """
    current.require_own()
    current.world().timelines.stop()
