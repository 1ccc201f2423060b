"""The results of a recording on the page: late ranks, times of steps, the gap after the start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from recordings import MILLISECOND, timeline_events, write_timeline

from torch_ring.tracing.page.analysis import (
    Gap,
    Step,
    arrivals,
    lateness,
    start_gap,
    step_times,
)
from torch_ring.tracing.page.charts import MOST_LANES, TimeAxis, lanes_of
from torch_ring.tracing.page.recording import Operation, Recording, read_recording


def read(tmp_path: Path, steps: int, ranks: int = 3, late_rank: int = 2) -> Recording:
    return read_recording(
        write_timeline(tmp_path / "timeline.json", timeline_events(steps, ranks, late_rank))
    )


@pytest.mark.parametrize("late_rank", [0, 1, 2])
def test_the_late_rank_is_named_and_no_other(tmp_path: Path, late_rank: int) -> None:
    recording = read(tmp_path, steps=4, late_rank=late_rank)
    late = lateness(recording, arrivals(recording), late_us=1 * MILLISECOND)
    assert [each.times_last for each in late] == [12 if r == late_rank else 0 for r in range(3)]
    assert {each.of for each in late} == {12}
    assert 5 * MILLISECOND <= late[late_rank].median_lag < 7 * MILLISECOND
    # Three operations of a step wait at once: that time counts once.
    assert late[late_rank].waited == 4 * (5 * MILLISECOND + 64 / (4 << 30) * 1e6 + 976.5625)


def test_nobody_is_late_by_less_than_asked_for(tmp_path: Path) -> None:
    recording = read(tmp_path, steps=4)
    late = lateness(recording, arrivals(recording), late_us=10 * MILLISECOND)
    assert {each.times_last for each in late} == {0}


def test_one_rank_alone_is_not_late(tmp_path: Path) -> None:
    recording = read(tmp_path, steps=2, ranks=1)
    assert set(arrivals(recording)) == {None}


def test_nobody_is_late_where_a_name_comes_again_without_a_number() -> None:
    recording = recording_of(operation(rank, "x", time) for rank, time in ((0, 0), (0, 9), (1, 9)))
    assert set(arrivals(recording)) == {None}


def test_step_times(tmp_path: Path) -> None:
    recording = read(tmp_path, steps=4)
    assert step_times(recording) == [Step(step, 20 * MILLISECOND, 2) for step in range(3)]


def test_a_step_of_one_late_rank_has_the_same_time_on_all_ranks() -> None:
    arrived = {0: [0, 10, 20, 30], 1: [0, 10, 25, 30]}  # rank 1 is late for backward pass 2
    recording = recording_of(
        operation(rank, f"backward.{step}", time, time)
        for rank, times in arrived.items()
        for step, time in enumerate(times)
    )
    assert step_times(recording) == [Step(0, 10, 0), Step(1, 15, 0), Step(2, 5, 1)]


def test_steps_of_a_job_without_an_optimizer_are_repetitions() -> None:
    recording = recording_of(
        operation(rank=0, name=name, submitted=10.0 * number)
        for number, name in enumerate(["a", "loss", "b", "loss", "b", "loss", "loss"])
    )
    assert step_times(recording) == [Step(0, 20.0, 0), Step(1, 20.0, 0), Step(2, 10.0, 0)]


def test_repetitions_have_the_same_number_on_a_rank_that_lacks_the_first_ones() -> None:
    recording = recording_of(
        operation(rank, "loss", 10.0 * number + rank, sequence=number)
        for rank, first in ((0, 0), (1, 2))
        for number in range(first, 5)
    )
    times = [(step.number, step.time) for step in step_times(recording)]
    assert times == [(0, 10.0), (1, 11.0), (2, 10.0), (3, 10.0)]


def test_the_gap_between_the_start_and_the_first_step_is_folded() -> None:
    start = [operation(rank, "weights", 0, 100_000) for rank in range(2)]
    steps = [
        operation(rank, f"backward.{step}", 900_000 + 200_000 * step, 950_000 + 200_000 * step)
        for rank in range(2)
        for step in range(3)
    ]
    gap = start_gap(recording_of([*start, *steps]))
    assert gap == Gap(100_000, 900_000)
    axis = TimeAxis(gap)
    assert axis.fold_length == 700
    places = [0, 100, 200, 250, 650]
    assert list(axis.place([0, 100_000, 900_000, 950_000, 1_350_000])) == places
    assert start_gap(recording_of(steps)) is None
    early = [operation(0, "weights", 0, 850_000)]
    assert start_gap(recording_of([*early, *steps])) is None


def test_operations_in_flight_at_once_have_lanes_of_their_own() -> None:
    operations = [
        operation(0, "a", 0, 10),
        operation(1, "a", 1, 10),
        operation(0, "b", 5, 20),
        operation(0, "c", 10, 12),
        operation(0, "d", 15, 30),
        operation(0, "e", 16, 30),
    ]
    assert lanes_of(operations) == ([0, 0, 1, 0, 0, 2], {0: 3, 1: 1})


def test_many_operations_at_once_share_lanes() -> None:
    operations = [operation(0, str(number), number, 1000) for number in range(MOST_LANES + 2)]
    operations.append(operation(0, "later", 2000, 2001))
    lanes, count = lanes_of(operations)
    assert count == {0: MOST_LANES}
    assert lanes == [*range(MOST_LANES), 0, 1, 0]


def operation(
    rank: int, name: str, submitted: float, finished: float | None = None, sequence: int = -1
) -> Operation:
    end = submitted if finished is None else finished
    return Operation(rank, "allreduce", name, "0", sequence, 4, submitted, submitted, end)


def recording_of(operations: Iterable[Operation]) -> Recording:
    found = sorted(operations, key=lambda each: (each.submitted, each.rank))
    return Recording(found, sorted({each.rank for each in found}), [], [])
