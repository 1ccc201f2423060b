# SPDX-License-Identifier: Apache-2.0
"""Results of a recording: late ranks, times of steps, and long times in which nothing happens."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torch_ring.tracing.page.recording import Operation, Recording, step_of

__all__ = [
    "Arrival",
    "Fold",
    "Lateness",
    "Step",
    "arrivals",
    "folds",
    "in_words",
    "lateness",
    "step_times",
]


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
    """Return the last rank for each operation; None where only one rank has recorded its end."""
    alike: defaultdict[tuple[str, int, str], list[int]] = defaultdict(list)
    for index, each in enumerate(recording.operations):
        alike[each.process_set, each.sequence, each.name].append(index)
    result: list[Arrival | None] = [None] * len(recording.operations)
    for indices in alike.values():
        operations = [recording.operations[index] for index in indices]
        ranks = {each.rank for each in operations}
        if len(ranks) < 2 or len(ranks) < len(operations):
            continue  # only one rank, or a repeated name without a sequence number: ambiguous
        if any(each.state not in ("completed", "failed") for each in operations):
            continue  # the last one has perhaps not come yet
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
    """A step of the job, up to a backward pass whose number it has: one time for all ranks."""

    number: int
    time: float  # microseconds
    last: int  # the rank that came last to this backward pass


@dataclass(frozen=True)
class Fold:
    """A time in which nothing happens on any rank, and its part that charts leave out.

    All in microseconds.
    """

    begin: float
    end: float
    left_out: float


def step_times(recording: Recording) -> list[Step]:
    """Return the steps whose previous one was recorded, too, on the same ranks.

    A step ends when the last rank comes to the first operation of a backward pass of a
    `DistributedOptimizer`: from then on all ranks work on it, so its time is one for all of them.
    In a job without one, it ends with an operation of the name that comes most often.
    """
    begins = _begins(recording)
    last = {
        step: max(of_ranks, key=lambda rank: of_ranks[rank]) for step, of_ranks in begins.items()
    }
    return [
        Step(step, begins[step][last[step]] - begins[before][last[before]], last[step])
        for before, step in pairwise(sorted(begins))
        if step == before + 1 and begins[step].keys() == begins[before].keys()
    ]


_LONG_STEPS = 3  # median steps from which on an idle time is long
_LONG_SHARE = 0.03  # of the time without long idle times, above which one is folded
_SHARE_OF_FOLD, _SHARE_OF_FOLDS = 0.02, 0.1  # of that time, that charts show of one, of all


def folds(recording: Recording) -> list[Fold]:
    """Return the long times in which nothing happens, in order.

    A time is idle if no rank has an operation under way, as while ranks load data, evaluate, or
    compute. An idle time is long if it is longer than three median steps (without steps: than a
    tenth of the recording). A time in which ranks only wait for another is folded if it takes more
    than half of the rest: so a hang leaves room for the operations before it.
    """
    idle, waits = _quiet_times(recording.operations)
    end = max(each.finished for each in recording.operations)
    steps = step_times(recording)
    least = _LONG_STEPS * median(each.time for each in steps) if steps else 0.1 * end
    long = [(begin, end) for begin, end in idle if end - begin > least]
    rest = end - sum(end - begin for begin, end in long)
    longest = max(waits, key=lambda wait: wait[1] - wait[0], default=(0.0, 0.0))
    wait = longest[1] - longest[0]
    result = []
    if rest / 2 < wait < rest:
        rest -= wait
        result.append(Fold(*longest, wait - min(wait, rest) / 2))
    long = [(begin, end) for begin, end in long if end - begin > _LONG_SHARE * rest > 0]
    for begin, end in long:
        shown = rest * min(_SHARE_OF_FOLD, _SHARE_OF_FOLDS / len(long))
        result.append(Fold(begin, end, max(end - begin - shown, (end - begin) / 2)))
    return sorted(result, key=lambda fold: fold.begin)


_Times = list[tuple[float, float]]


def _quiet_times(operations: list[Operation]) -> tuple[_Times, _Times]:
    """Return the times without a beginning or an end: idle ones, and those in which ranks wait."""
    under_way: Counter[float] = Counter()
    moving: Counter[float] = Counter()  # data
    for each in operations:
        under_way[each.submitted] += 1
        under_way[each.started] += 0
        under_way[each.finished] -= 1
        if each.state == "completed":
            moving[each.started] += 1
            moving[each.finished] -= 1
    idle: _Times = []
    waits: _Times = []
    running = busy = 0
    for begin, end in pairwise(sorted(under_way)):
        running += under_way[begin]
        busy += moving[begin]
        if not busy:
            (waits if running else idle).append((begin, end))
    return idle, waits


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
    steps = [each for each in operations if each.name == name]
    # The same on all ranks, also of a dump that lacks its first ones.
    numbered = {(each.process_set, each.sequence) for each in steps if each.sequence >= 0}
    numbers = {key: number for number, key in enumerate(sorted(numbered))}
    counts: Counter[int] = Counter()
    begins: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for each in steps:
        number = numbers.get((each.process_set, each.sequence), counts[each.rank])
        counts[each.rank] += 1
        begins[number].setdefault(each.rank, each.submitted)
    return begins


def in_words(microseconds: float, digits: int = 4) -> str:
    """Return a time in microseconds, milliseconds or seconds; `digits`: of seconds, at most."""
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    if microseconds < 1e6:
        return f"{microseconds / 1e3:.3g} ms"
    return f"{microseconds / 1e6:.{digits}g} s"
