"""Results of a recording: late ranks, times of steps, and the idle time before the first one."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torch_ring.tracing.page.recording import Operation, Recording, step_of

__all__ = ["Arrival", "Gap", "Lateness", "Step", "arrivals", "lateness", "start_gap", "step_times"]

_LEAST_GAP = 0.1  # of the recording, before a gap is worth folding


@dataclass(frozen=True)
class Arrival:
    """The last rank to reach an operation, and its lag behind the first one, in microseconds."""

    last: int
    lag: float


@dataclass(frozen=True)
class Lateness:
    """The number of operations, recorded by all ranks, where a rank was late by `late_us`."""

    rank: int
    times_last: int
    of: int
    median_lag: float  # microseconds, of those times
    waited: float  # microseconds in which another rank waited for it then


def arrivals(recording: Recording) -> list[Arrival | None]:
    """Return the last rank for each operation; None where only one rank has recorded it."""
    alike: defaultdict[tuple[str, int, str], list[int]] = defaultdict(list)
    for index, each in enumerate(recording.operations):
        alike[each.process_set, each.sequence, each.name].append(index)
    result: list[Arrival | None] = [None] * len(recording.operations)
    for indices in alike.values():
        operations = [recording.operations[index] for index in indices]
        ranks = {each.rank for each in operations}
        if len(ranks) < 2 or len(ranks) < len(operations):
            continue  # only one rank, or a repeated name without a sequence number: ambiguous
        first = min(each.submitted for each in operations)
        last = max(operations, key=lambda each: each.submitted)
        arrival = Arrival(last.rank, last.submitted - first)
        for index in indices:
            result[index] = arrival
    return result


def lateness(recording: Recording, arrived: list[Arrival | None], late_us: float) -> list[Lateness]:
    """Return for each rank how often it was last, and how long others waited for it."""
    waits: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    of: defaultdict[int, int] = defaultdict(int)
    for operation, arrival in zip(recording.operations, arrived, strict=True):
        if arrival is None:
            continue
        of[operation.rank] += 1
        if arrival.last == operation.rank and arrival.lag >= late_us:
            end = operation.submitted
            waits[operation.rank].append((end - arrival.lag, end))
    result = []
    for rank in recording.ranks:
        lag = median(end - begin for begin, end in waits[rank]) if waits[rank] else 0.0
        result.append(Lateness(rank, len(waits[rank]), of[rank], lag, _length(waits[rank])))
    return result


def _length(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length, covered = 0.0, -math.inf
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return length


@dataclass(frozen=True)
class Step:
    """A step of the job: one time for all ranks."""

    number: int
    time: float  # microseconds
    last: int  # the rank that came last to its beginning


@dataclass(frozen=True)
class Gap:
    """Time in which no rank has an operation under way, microseconds."""

    begin: float
    end: float


def step_times(recording: Recording) -> list[Step]:
    """Return the steps whose next one was recorded, too.

    A step begins when the last rank comes to its first operation: from then on all ranks work on
    it, so its time is one for all of them. It is a backward pass of a `DistributedOptimizer`; in a
    job without one, an operation of the name that comes most often.
    """
    begins = _begins(recording)
    last = {
        step: max(of_ranks, key=lambda rank: of_ranks[rank]) for step, of_ranks in begins.items()
    }
    return [
        Step(step, begins[following][last[following]] - begins[step][last[step]], last[step])
        for step, following in pairwise(sorted(begins))
        if following == step + 1
    ]


def start_gap(recording: Recording) -> Gap | None:
    """Return the idle time between the operations of the start and the first step.

    None where it is less than a tenth of the recording, or nothing came before the first step.
    """
    begins = _begins(recording)
    first = min(min(of_ranks.values()) for of_ranks in begins.values())
    before = [each.finished for each in recording.operations if each.submitted < first]
    end = max(each.finished for each in recording.operations)
    if not before or first - max(before) < _LEAST_GAP * end:
        return None
    return Gap(max(before), first)


def _begins(recording: Recording) -> dict[int, dict[int, float]]:
    """Return for each step, and each rank in it, when the rank came to its first operation."""
    begins: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for each in recording.operations:
        step = step_of(each.name)
        if step is not None:
            begins[step].setdefault(each.rank, each.submitted)
    return begins or _repetitions(recording.operations)


def _repetitions(operations: list[Operation]) -> dict[int, dict[int, float]]:
    """Return the same for the operations of the most frequent name, each a step."""
    name = Counter(each.name for each in operations).most_common(1)[0][0]
    counts: Counter[int] = Counter()
    numbers: dict[tuple[str, int], int] = {}
    begins: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for each in operations:
        if each.name != name:
            continue
        number = counts[each.rank]
        if each.sequence >= 0:  # the same on all ranks, also of a dump that lacks its first ones
            number = numbers.setdefault((each.process_set, each.sequence), len(numbers))
        counts[each.rank] += 1
        begins[number].setdefault(each.rank, each.submitted)
    return begins
