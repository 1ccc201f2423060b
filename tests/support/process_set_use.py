# SPDX-License-Identifier: Apache-2.0
"""Uses of a process set that tests of several files share."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from pool import error_of, eventually

import torch_ring as hvd
from torch_ring.setup.connect import Connections
from torch_ring.world import current
from torch_ring.world.process_set import engine_of, root_in


def started_sum(process_set: hvd.ProcessSet, value: float, name: str = "sum") -> Any:
    """Return the pending work of a sum over the set."""
    tensor = torch.full((1000,), value)
    return engine_of(process_set).submit("allreduce", tensor, tensor, name, False, hvd.Sum)


def sum_of_ranks(process_set: hvd.ProcessSet) -> float:
    """Return the sum of the members' ranks, over the set."""
    result: torch.Tensor = started_sum(process_set, hvd.rank()).wait()
    assert (result == result[0]).all()
    return float(result[0])


def connections() -> Connections:
    """Return this process's connections to the other ranks."""
    return current.world().process_sets._connections


def memory_bytes() -> int:
    """Return the allocated size of the memory that the ranks of this host share."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        with contextlib.suppress(OSError):  # of listdir() itself
            if "/memfd:torch_ring" in os.readlink(path):
                return os.stat(path).st_blocks * 512
    return 0


def resources() -> tuple[int, int]:
    """Return the number of descriptors and of threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def holds_no_more_than(before: tuple[int, int]) -> bool:
    """Return whether the descriptors and threads are soon no more than before."""
    return eventually(lambda: all(a <= b for a, b in zip(resources(), before, strict=True)), 20.0)


def check_process_set(process_set: hvd.ProcessSet, ranks: Sequence[int]) -> None:
    """Use a set of `ranks` if this rank is a member; else check that it cannot."""
    assert process_set.ranks == sorted(ranks)
    assert process_set.size() == len(ranks)
    assert process_set.included() == (hvd.rank() in ranks)
    if process_set.included():
        assert process_set.rank() == sorted(ranks).index(hvd.rank())
        assert root_in(process_set, max(ranks)) == len(ranks) - 1
        assert sum_of_ranks(process_set) == sum(ranks)
        outside = next((r for r in range(hvd.size()) if r not in ranks), hvd.size())
        kind, text = error_of(lambda: root_in(process_set, outside))
        assert (kind, f"root_rank={outside} is not in" in text) == ("InvalidArgumentError", True)
        return
    for misuse in (
        lambda: engine_of(process_set),
        lambda: root_in(process_set, ranks[0]),
        process_set.rank,
    ):
        kind, text = error_of(misuse)
        assert (kind, f"rank {hvd.rank()} is not in" in text) == ("InvalidArgumentError", True)
