# SPDX-License-Identifier: Apache-2.0
"""in_turns(): times variants in turns, so that other load on the machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

import torch_ring as hvd


def seconds(run: Callable[[], object], iterations: int, untimed: int = 0) -> float:
    """Return the time of one iteration on this rank (0 of none). All ranks begin together.

    `untimed` iterations come first: they fill the caches with this variant's data, and meanwhile
    the previous variant's threads fall asleep.
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
        variants: by name, functions that return a time on this rank, in seconds.
        rounds: the number of counted rounds.
        warm_up: the number of rounds before them.

    Returns:
        By name, the time of the slowest rank in each round: the same on all ranks.
    """
    times = [[run() for run in variants.values()] for _ in range(warm_up + rounds)][warm_up:]
    slowest = hvd.allreduce(torch.tensor(times, dtype=torch.float64), op=hvd.Max)
    return dict(zip(variants, slowest.T.tolist(), strict=True))


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of each variant's rounds."""
    return {name: statistics.median(rounds) for name, rounds in times.items()}
