"""Results of a recording: late ranks, and times of steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torch_ring.tracing.page.recording import Operation, Recording, step_of

__all__ = ["Arrival", "Lateness", "arrivals", "lateness", "step_times"]


@dataclass(frozen=True)
class Arrival:
    """The last rank to come to an operation, and how long after the first one, microseconds."""

    last: int
    lag: float


@dataclass(frozen=True)
class Lateness:
    """How often a rank was last by `late_us` or more, of the operations that all ranks have."""

    rank: int
    times_last: int
    of: int
    median_lag: float  # microseconds, of those times


def arrivals(recording: Recording) -> list[Arrival | None]:
    """Return for each operation who came last to it; None where only one rank has recorded it."""
    alike: defaultdict[tuple[str, int, str], list[int]] = defaultdict(list)
    for index, each in enumerate(recording.operations):
        alike[each.process_set, each.sequence, each.name].append(index)
    result: list[Arrival | None] = [None] * len(recording.operations)
    for indices in alike.values():
        operations = [recording.operations[index] for index in indices]
        ranks = {each.rank for each in operations}
        if len(ranks) < 2 or len(ranks) < len(operations):
            continue  # alone, or a name without a sequence that comes again: which one, unknown
        first = min(each.submitted for each in operations)
        last = max(operations, key=lambda each: each.submitted)
        arrival = Arrival(last.rank, last.submitted - first)
        for index in indices:
            result[index] = arrival
    return result


def lateness(recording: Recording, arrived: list[Arrival | None], late_us: float) -> list[Lateness]:
    """Return for each rank how often it was last."""
    lags: defaultdict[int, list[float]] = defaultdict(list)
    of: defaultdict[int, int] = defaultdict(int)
    for operation, arrival in zip(recording.operations, arrived, strict=True):
        if arrival is None:
            continue
        of[operation.rank] += 1
        if arrival.last == operation.rank and arrival.lag >= late_us:
            lags[operation.rank].append(arrival.lag)
    return [
        Lateness(rank, len(lags[rank]), of[rank], median(lags[rank]) if lags[rank] else 0.0)
        for rank in recording.ranks
    ]


def step_times(recording: Recording) -> dict[int, list[tuple[int, float]]]:
    """Return for each rank (step, microseconds from its first operation to the next step's).

    A step is a backward pass of a `DistributedOptimizer`; in a job without one it is the time from
    an operation to the next one of its name, for the name that comes most often.
    """
    begins: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for each in recording.operations:
        step = step_of(each.name)
        if step is not None:
            begins[each.rank].setdefault(step, each.submitted)
    if not begins:
        begins = _repetitions(recording.operations)
    result = {}
    for rank, times in begins.items():
        steps = sorted(times)
        result[rank] = [
            (step, times[following] - times[step])
            for step, following in pairwise(steps)
            if following == step + 1
        ]
    return {rank: steps for rank, steps in sorted(result.items()) if steps}


def _repetitions(operations: list[Operation]) -> defaultdict[int, dict[int, float]]:
    counts: defaultdict[str, int] = defaultdict(int)
    for each in operations:
        counts[each.name] += 1
    name = max(counts, key=lambda each: counts[each])
    begins: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for each in operations:
        if each.name == name:
            begins[each.rank][len(begins[each.rank])] = each.submitted
    return begins
