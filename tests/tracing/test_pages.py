# SPDX-License-Identifier: Apache-2.0
"""The page of a recording: its input files, its results, and the command that draws it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import MILLISECOND, dump_of, failed_dump, timeline_events, write_timeline

from torch_ring._C import COLLECTIVES
from torch_ring.tracing.command import main
from torch_ring.tracing.page.analysis import (
    Fold,
    Step,
    arrivals,
    folds,
    lateness,
    step_times,
)
from torch_ring.tracing.page.charts import COLORS, MOST_LANES, TimeAxis, lanes_of
from torch_ring.tracing.page.document import draw_page
from torch_ring.tracing.page.recording import (
    KINDS,
    NothingToShowError,
    Operation,
    Recording,
    events_of,
    read_recording,
    step_of,
)


def test_the_page_knows_every_collective() -> None:
    """It does without torch, so it has a table of its own."""
    assert list(COLORS) == [each.name for each in COLLECTIVES]
    for each in COLLECTIVES:
        alike = [other.name for other in COLLECTIVES if other.torch == each.torch]
        assert KINDS.get(each.torch, each.torch) == alike[0]


def test_a_timeline_has_its_waits_and_its_transfers(tmp_path: Path) -> None:
    file = write_timeline(tmp_path / "timeline.json", timeline_events(steps=2))
    recording = read_recording(file)
    assert recording.ranks == [0, 1]
    assert len(recording.operations) == 2 * 3 * 2
    bucket = next(
        each for each in recording.operations if each.name == "gradients.0.1.0.0" and each.rank == 0
    )
    assert bucket.kind == "allreduce"
    assert bucket.bytes == 4 << 20
    assert bucket.submitted == 20 * MILLISECOND
    assert bucket.started == pytest.approx(25 * MILLISECOND + 64 / (4 << 30) * 1e6)
    assert bucket.finished - bucket.started == pytest.approx((4 << 20) / (4 << 30) * 1e6)


@pytest.mark.parametrize("lost", [1, 2, 30, 300])
def test_a_timeline_whose_writer_was_killed(tmp_path: Path, lost: int) -> None:
    whole = write_timeline(tmp_path / "whole.json", timeline_events(steps=3)).read_text()
    events = events_of(whole)
    found = events_of(whole[:-lost])
    assert found == events[: len(found)]
    assert len(found) >= len(events) - 3


def test_what_is_no_trace() -> None:
    for text in ("", "hello", "7", '{"a": 1}', "[\nx,\ny,\nz"):
        with pytest.raises(ValueError, match=r"array that lacks its end|list of events"):
            events_of(text)


def test_dumps_of_two_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"dump_{rank}").write_text(json.dumps(dump_of(rank, late_by_ms=7 * rank)))
    recording = read_recording(tmp_path)
    first, late, *waiting = recording.operations
    assert (first.rank, first.submitted, first.started) == (0, 0.0, 8 * MILLISECOND)
    assert (late.rank, late.submitted) == (1, 7 * MILLISECOND)
    assert {each.bytes for each in recording.operations} == {1024 * 4 * 4}
    assert {each.state for each in waiting} == {"scheduled"}
    assert {each.finished for each in waiting} == {9.5 * MILLISECOND}  # with the recording
    assert "own clock" in " ".join(recording.notes)


def test_a_dump_of_torch_ring_has_names(tmp_path: Path) -> None:
    dump = dump_of(rank=0)
    dump["entries"][0]["ring"] = {"name": "gradients.0.7.0.0", "bytes": 77}
    (tmp_path / "flight_0").write_bytes(pickle.dumps(dump))
    bucket, other = read_recording(tmp_path).operations
    assert (bucket.name, bucket.bytes) == ("gradients.0.7.0.0", 77)
    assert other.name == "all_reduce 2"


def test_a_failed_operation_has_its_error_and_its_end(tmp_path: Path) -> None:
    (tmp_path / "flight_0").write_bytes(pickle.dumps(failed_dump()))
    _, failed, later = read_recording(tmp_path).operations
    assert (failed.name, failed.state, failed.error) == (
        "loss",
        "failed",
        "rank 0: the ranks <disagree>",
    )
    assert failed.finished - failed.submitted == pytest.approx(0.5 * MILLISECOND)
    assert (later.state, later.error) == ("scheduled", "")


def test_the_page_lists_failed_operations(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install bokeh")
    (tmp_path / "flight_0").write_bytes(pickle.dumps(failed_dump()))
    page = draw_page(read_recording(tmp_path), "a job", 1000.0)
    assert "<dt>failed</dt><dd>1</dd>" in page
    assert "<dt>not completed</dt><dd>1</dd>" in page
    card = page.partition("Failed operations")[2].partition("</section>")[0]
    assert "<td>rank 0</td><td>allreduce loss</td>" in card
    assert '<td class="error">rank 0: the ranks &lt;disagree&gt;</td>' in card
    (tmp_path / "flight_0").write_bytes(pickle.dumps(dump_of(rank=0)))
    assert "Failed operations" not in draw_page(read_recording(tmp_path), "a job", 1000.0)


def test_an_operation_under_way_lasts_until_the_dump_was_written(tmp_path: Path) -> None:
    dump = dump_of(rank=0)
    dump["written_ns"] = dump["entries"][1]["time_created_ns"] + 60_000_000_000
    (tmp_path / "flight_0").write_bytes(pickle.dumps(dump))
    _, waiting = read_recording(tmp_path).operations
    assert waiting.started - waiting.submitted == pytest.approx(60_000 * MILLISECOND)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("evil",)


def test_a_pickle_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flight_0").write_bytes(pickle.dumps(dump_of(0) | {"version": Evil()}))
    with pytest.raises(NothingToShowError, match="not plain data"):
        read_recording(tmp_path / "flight_0")
    assert not (tmp_path / "evil").exists()


def test_a_dump_without_its_rank_has_it_in_its_name(tmp_path: Path) -> None:
    dump = dump_of(rank=0)
    del dump["rank"]
    (tmp_path / "dump_12").write_text(json.dumps(dump))
    (tmp_path / "flight_3").write_bytes(pickle.dumps(dump))  # as torch writes it
    assert read_recording(tmp_path).ranks == [3, 12]
    with pytest.raises(NothingToShowError, match="does not end with a rank's number"):
        read_recording((tmp_path / "dump_12").rename(tmp_path / "dump"))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    write_timeline(tmp_path / "timeline.json", timeline_events(steps=1))
    (tmp_path / "notes.txt").write_text("buy milk")
    notes = read_recording(tmp_path).notes
    assert any(note.startswith("notes.txt was left out") for note in notes)


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(NothingToShowError, match=r"no timeline .* and no flight-recorder dump"):
        read_recording(tmp_path)
    with pytest.raises(NothingToShowError, match="no such file"):
        read_recording(tmp_path / "nowhere")
    for missing in ("ts", "pid"):
        events = timeline_events(steps=1)
        del events[-1][missing]
        with pytest.raises(NothingToShowError, match=f"KeyError\\('{missing}'\\)"):
            read_recording(write_timeline(tmp_path / "timeline.json", events))


def test_steps_are_backward_passes() -> None:
    assert step_of("backward.7") == 7
    assert step_of("backward.7.weights") == 7
    assert step_of("gradients.1.42.0.1048576") == 42
    assert step_of("gradients.norm") is None
    assert step_of("#3") is None


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
    assert step_times(recording) == [Step(step, 20 * MILLISECOND, 2) for step in range(1, 4)]


def test_a_step_of_one_late_rank_has_the_same_time_on_all_ranks() -> None:
    arrived = {0: [0, 10, 20, 30], 1: [0, 10, 25, 30]}  # rank 1 is late for backward pass 2
    recording = recording_of(
        operation(rank, f"backward.{step}", time, time)
        for rank, times in arrived.items()
        for step, time in enumerate(times)
    )
    assert step_times(recording) == [Step(1, 10, 0), Step(2, 15, 1), Step(3, 5, 0)]


def test_steps_of_a_job_without_an_optimizer_are_repetitions() -> None:
    recording = recording_of(
        operation(rank=0, name=name, submitted=10.0 * number)
        for number, name in enumerate(["a", "loss", "b", "loss", "b", "loss", "loss"])
    )
    assert step_times(recording) == [Step(1, 20.0, 0), Step(2, 20.0, 0), Step(3, 10.0, 0)]


def test_repetitions_have_the_same_number_on_a_rank_that_lacks_the_first_ones() -> None:
    recording = recording_of(
        operation(rank, "loss", 10.0 * number + rank, sequence=number)
        for rank, first in ((0, 0), (1, 2))
        for number in range(first, 5)
    )
    times = [(step.number, step.time) for step in step_times(recording)]
    assert times == [(1, 10.0), (3, 10.0), (4, 10.0)]


@pytest.mark.parametrize("name", ["backward.{}", "loss"])
def test_clocks_of_hosts_that_differ_make_no_negative_steps(name: str) -> None:
    recording = recording_of(
        operation(rank, name.format(number), begin + 10.0 * number, sequence=number)
        for rank, begin, numbers in ((0, 0, range(2, 6)), (1, 1000, range(4)))
        for number in numbers
    )
    assert {step.time for step in step_times(recording)} == {10.0}


def steps_at(*begins: float, length: float = 50, ranks: int = 2) -> list[Operation]:
    """Return a backward pass of `length` milliseconds at each of these, on all ranks."""
    return [
        operation(
            rank, f"backward.{step}", begin * MILLISECOND, (begin + length) * MILLISECOND, step
        )
        for rank in range(ranks)
        for step, begin in enumerate(begins)
    ]


def folded(operations: Iterable[Operation]) -> list[tuple[float, float]]:
    """Return the folded times, in milliseconds."""
    found = folds(recording_of(operations))
    return [(fold.begin / MILLISECOND, fold.end / MILLISECOND) for fold in found]


def test_long_idle_times_are_folded_wherever_they_are() -> None:
    start = [operation(rank, "weights", 0, 100 * MILLISECOND) for rank in range(2)]
    steps = steps_at(900, 1100, 1300, 2500, 2700, 2900)
    assert folded([*start, *steps]) == [(100, 900), (1350, 2500)]
    assert folded(steps_at(*range(0, 1000, 200))) == []  # ranks compute between the passes
    one_is_busy = [*steps, operation(1, "loss", 1320 * MILLISECOND, 2400 * MILLISECOND)]
    assert folded([*start, *one_is_busy]) == [(100, 900)]


def test_many_idle_times_are_folded_though_each_is_a_small_part_of_the_whole() -> None:
    begins = [200 * step + 2000 * (step // 5) for step in range(100)]
    found = folds(recording_of(steps_at(*begins)))
    assert len(found) == 19
    shown = sum(fold.end - fold.begin - fold.left_out for fold in found)
    whole = (begins[-1] + 50) * MILLISECOND - sum(fold.left_out for fold in found)
    assert shown < 0.11 * whole


def test_a_recording_without_steps_is_folded() -> None:
    apart = [
        operation(rank, name, time, time + 5)
        for rank in (0, 1)
        for name, time in (("a", 0), ("b", 1000))
    ]
    assert [(fold.begin, fold.end) for fold in folds(recording_of(apart))] == [(5, 1000)]
    assert folds(recording_of([operation(0, "a", 0, 5)])) == []
    assert folds(recording_of([operation(0, "a", 0, 0), operation(0, "b", 9, 9)])) == []


def test_a_hang_leaves_room_for_the_operations_before_it() -> None:
    steps = steps_at(0, 200, 400)
    transfers = [
        operation(rank, "backward.3", (600 + 10 * rank) * MILLISECOND, 60_000 * MILLISECOND)
        for rank in range(2)
    ]
    assert folds(recording_of([*steps, *transfers])) == []  # data move
    waiting = [replace(each, state="started") for each in transfers]
    (fold,) = folds(recording_of([*steps, *waiting]))
    assert (fold.begin, fold.end) == (610 * MILLISECOND, 60_000 * MILLISECOND)
    assert fold.end - fold.begin - fold.left_out == 305 * MILLISECOND
    shorter = [operation(0, "backward.3", 600 * MILLISECOND, 800 * MILLISECOND)]
    assert folds(recording_of([*steps, *shorter])) == []  # a wait to look at


def test_places_of_times_beside_folds() -> None:
    axis = TimeAxis([Fold(100_000, 900_000, 700_000), Fold(950_000, 2_000_000, 1_000_000)], 1e6)
    times = [0, 100_000, 900_000, 950_000, 2_000_000, 2_100_000]
    assert list(axis.place(times)) == [0, 100, 200, 250, 300, 400]


def test_the_last_rank_of_an_operation_under_way_is_not_known() -> None:
    operations = [operation(rank, "loss", rank, 99, sequence=1) for rank in range(2)]
    for each in operations:
        each.state = "scheduled"
    assert arrivals(recording_of(operations)) == [None, None]


def test_operations_in_flight_at_once_have_lanes_of_their_own() -> None:
    operations = [
        operation(0, "a", 0, 10),
        operation(1, "a", 1, 10),
        operation(0, "b", 5, 20),
        operation(0, "c", 10, 12),
        operation(0, "d", 15, 30),
        operation(0, "e", 16, 30),
    ]
    assert lanes_of(operations) == [(0, 3), (0, 1), (1, 3), (0, 3), (0, 3), (2, 3)]


def test_an_operation_that_is_alone_has_the_whole_row() -> None:
    at_once = [operation(0, str(number), number, 1000) for number in range(3)]
    assert lanes_of([*at_once, operation(0, "alone", 1000, 1001)])[-1] == (0, 1)


def test_many_operations_at_once_share_lanes() -> None:
    operations = [operation(0, str(number), number, 1000) for number in range(MOST_LANES + 2)]
    assert lanes_of(operations) == [(n, MOST_LANES) for n in [*range(MOST_LANES), 0, 1]]
    assert lanes_of(operations, most=1) == [(0, 1)] * (MOST_LANES + 2)


def operation(
    rank: int, name: str, submitted: float, finished: float | None = None, sequence: int = -1
) -> Operation:
    end = submitted if finished is None else finished
    return Operation(rank, "allreduce", name, "0", sequence, 4, submitted, submitted, end)


def recording_of(operations: Iterable[Operation]) -> Recording:
    found = sorted(operations, key=lambda each: (each.submitted, each.rank))
    return Recording(found, sorted({each.rank for each in found}), [], [])


DEADLINE_S = 60


def show(
    *arguments: str, without: tuple[str, ...] = ("torch",)
) -> subprocess.CompletedProcess[str]:
    """Run the command in a Python without some modules, whose locale knows ASCII only."""
    program = (
        "import sys, runpy\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {without!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "runpy.run_module('torch_ring.tracing', run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, "show", *arguments],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_it_draws_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install bokeh")
    write_timeline(tmp_path / "timeline.json", timeline_events(steps=2))
    done = show(str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "12 operations of 2 ranks" in done.stdout
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "gradients.0.1.0.0" in page or "gradients.0.0.0.0" in page
    assert '<script src="http' not in page
    again = show(str(tmp_path))  # its own page is no recording
    assert again.returncode == 0, again.stderr
    assert "left out" not in again.stdout


@pytest.mark.parametrize("number", [2**40 + 5, 2**44 + 1], ids=["not agreed on", "launched"])
def test_it_draws_operations_without_an_agreement(tmp_path: Path, number: int) -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install bokeh")
    for rank in range(2):
        dump = dump_of(rank)
        dump["entries"][1]["collective_seq_id"] = number
        (tmp_path / f"dump_{rank}").write_text(json.dumps(dump))
    assert main(["show", str(tmp_path)]) == 0
    assert (tmp_path / "page.html").exists()


def test_without_bokeh_it_says_what_to_install(tmp_path: Path) -> None:
    write_timeline(tmp_path / "timeline.json", timeline_events(steps=1))
    done = show(str(tmp_path), without=("torch", "bokeh"))
    assert done.returncode == 1
    assert "pip install 'torch_ring[trace]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_nothing_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "has no timeline" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("value", ["-1", "inf", "soon"])
def test_a_time_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["show", str(tmp_path), f"--late-ms={value}"])
    assert "--late-ms" in capsys.readouterr().err
