"""The results of a recording on the page: late ranks, and times of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import MILLISECOND, timeline_events, write_timeline

from torch_ring.tracing.page.analysis import (
    arrivals,
    lateness,
    step_times,
)
from torch_ring.tracing.page.charts import MOST_LANES, lanes_of
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


def test_nobody_is_late_by_less_than_asked_for(tmp_path: Path) -> None:
    recording = read(tmp_path, steps=4)
    late = lateness(recording, arrivals(recording), late_us=10 * MILLISECOND)
    assert {each.times_last for each in late} == {0}


def test_one_rank_alone_is_not_late(tmp_path: Path) -> None:
    recording = read(tmp_path, steps=2, ranks=1)
    assert set(arrivals(recording)) == {None}


def test_step_times(tmp_path: Path) -> None:
    times = step_times(read(tmp_path, steps=4))
    assert set(times) == {0, 1, 2}
    assert times[0] == [(step, 20 * MILLISECOND) for step in range(3)]


def test_steps_of_a_job_without_an_optimizer_are_repetitions() -> None:
    operations = [
        operation(rank=0, name=name, submitted=10.0 * number)
        for number, name in enumerate(["a", "loss", "b", "loss", "b", "loss", "loss"])
    ]
    recording = Recording(operations, [0], [], [])
    assert step_times(recording) == {0: [(0, 20.0), (1, 20.0), (2, 10.0)]}


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


def operation(rank: int, name: str, submitted: float, finished: float | None = None) -> Operation:
    end = submitted if finished is None else finished
    return Operation(rank, "allreduce", name, "0", -1, 4, submitted, submitted, end)
