"""Times several variants of a work in turns: whatever else the machine does meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

import torch_ring as hvd


def seconds(run: Callable[[], object], iterations: int, untimed: int = 0) -> float:
    """Return the time of one iteration on this rank, or of none. All ranks begin together.

    `untimed` iterations come first: then the caches have what this work needs and not what the one
    before left, and its threads sleep.
    """
    for _ in range(untimed):
        run()
    hvd.barrier()
    started = time.perf_counter()
    for _ in range(iterations):
        run()
    return (time.perf_counter() - started) / max(1, iterations)


def in_turns(
    variants: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Call each variant once a round, in order: A B C, A B C, ... Collective.

    Args:
        variants: by name, what returns a time on this rank, in seconds.
        rounds: how many are counted.
        warm_up: how many before them are not.

    Returns:
        By name, the time of the slowest rank in each round: the same on all ranks.
    """
    times = [[run() for run in variants.values()] for _ in range(warm_up + rounds)][warm_up:]
    slowest = hvd.allreduce(torch.tensor(times, dtype=torch.float64), op=hvd.Max)
    return dict(zip(variants, slowest.T.tolist(), strict=True))


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of each variant's rounds."""
    return {name: statistics.median(rounds) for name, rounds in times.items()}
