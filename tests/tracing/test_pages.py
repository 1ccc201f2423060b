# SPDX-License-Identifier: Apache-2.0
"""The page of a recording: its input files, its results, and the command that draws it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from recordings import MILLISECOND, dump_of, failed_dump, timeline_events, write_timeline

from torch_ring._C import COLLECTIVES
from torch_ring.tracing.command import main
from torch_ring.tracing.page.analysis import Step, arrivals, folds, lateness, step_times
from torch_ring.tracing.page.charts import COLORS
from torch_ring.tracing.page.document import draw_page
from torch_ring.tracing.page.recording import (
    KINDS,
    NothingToShowError,
    Operation,
    Recording,
    events_of,
    read_recording,
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


def test_a_timeline_whose_writer_was_killed(tmp_path: Path) -> None:
    whole = write_timeline(tmp_path / "whole.json", timeline_events(steps=3)).read_text()
    events = events_of(whole)
    for lost in (1, 2, 30, 300):
        found = events_of(whole[:-lost])
        assert found == events[: len(found)]
        assert len(found) >= len(events) - 3
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


def test_a_failed_operation_has_its_error_and_its_end(tmp_path: Path) -> None:
    """A dump of torch_ring has names and bytes, too."""
    dump = failed_dump()
    dump["entries"][0]["ring"] = {"name": "gradients.0.7.0.0", "bytes": 77}
    dump["written_ns"] = dump["entries"][2]["time_created_ns"] + 60_000_000_000
    (tmp_path / "flight_0").write_bytes(pickle.dumps(dump))
    bucket, failed, waiting = read_recording(tmp_path).operations
    assert (bucket.name, bucket.bytes) == ("gradients.0.7.0.0", 77)
    assert (failed.name, failed.state) == ("loss", "failed")
    assert failed.error == "rank 0: the ranks <disagree>"
    assert failed.finished - failed.submitted == pytest.approx(0.5 * MILLISECOND)
    # An operation under way lasts until the dump was written.
    assert (waiting.state, waiting.error) == ("scheduled", "")
    assert waiting.started - waiting.submitted == pytest.approx(60_000 * MILLISECOND)


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


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(NothingToShowError, match=r"no timeline .* and no flight-recorder dump"):
        read_recording(tmp_path)
    with pytest.raises(NothingToShowError, match="no such file"):
        read_recording(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("buy milk")
    write_timeline(tmp_path / "timeline.json", timeline_events(steps=1))
    notes = read_recording(tmp_path).notes
    assert any(note.startswith("notes.txt was left out") for note in notes)
    for missing in ("ts", "pid"):
        events = timeline_events(steps=1)
        del events[-1][missing]
        with pytest.raises(NothingToShowError, match=f"KeyError\\('{missing}'\\)"):
            read_recording(write_timeline(tmp_path / "timeline.json", events))


def read(tmp_path: Path, steps: int, ranks: int = 3, late_rank: int = 2) -> Recording:
    return read_recording(
        write_timeline(tmp_path / "timeline.json", timeline_events(steps, ranks, late_rank))
    )


@pytest.mark.parametrize("late_rank", [0, 2])
def test_the_late_rank_is_named_and_no_other(tmp_path: Path, late_rank: int) -> None:
    recording = read(tmp_path, steps=4, late_rank=late_rank)
    late = lateness(recording, arrivals(recording), late_us=1 * MILLISECOND)
    assert [each.times_last for each in late] == [12 if r == late_rank else 0 for r in range(3)]
    assert {each.of for each in late} == {12}
    assert 5 * MILLISECOND <= late[late_rank].median_lag < 7 * MILLISECOND
    # Three operations of a step wait at once: that time counts once.
    assert late[late_rank].waited == 4 * (5 * MILLISECOND + 64 / (4 << 30) * 1e6 + 976.5625)
    # Nobody is late by less than asked for, and one rank alone is not late.
    late = lateness(recording, arrivals(recording), late_us=10 * MILLISECOND)
    assert {each.times_last for each in late} == {0}
    assert {*arrivals(read(tmp_path, steps=2, ranks=1))} == {None}
    assert step_times(recording) == [
        Step(step, 20 * MILLISECOND, late_rank) for step in range(1, 4)
    ]


def test_nobody_is_late_where_a_name_comes_again_without_a_number() -> None:
    recording = recording_of(operation(rank, "x", time) for rank, time in ((0, 0), (0, 9), (1, 9)))
    assert set(arrivals(recording)) == {None}
    operations = [operation(rank, "loss", rank, 99, sequence=1) for rank in range(2)]
    for each in operations:  # the last rank of an operation under way is not known
        each.state = "scheduled"
    assert arrivals(recording_of(operations)) == [None, None]


def test_a_step_of_one_late_rank_has_the_same_time_on_all_ranks() -> None:
    arrived = {0: [0, 10, 20, 30], 1: [0, 10, 25, 30]}  # rank 1 is late for backward pass 2
    recording = recording_of(
        operation(rank, f"backward.{step}", time, time)
        for rank, times in arrived.items()
        for step, time in enumerate(times)
    )
    assert step_times(recording) == [Step(1, 10, 0), Step(2, 15, 1), Step(3, 5, 0)]


def test_steps_of_a_job_without_an_optimizer_are_repetitions() -> None:
    """They have the same number on a rank that lacks the first ones."""
    recording = recording_of(
        operation(rank=0, name=name, submitted=10.0 * number)
        for number, name in enumerate(["a", "loss", "b", "loss", "b", "loss", "loss"])
    )
    assert step_times(recording) == [Step(1, 20.0, 0), Step(2, 20.0, 0), Step(3, 10.0, 0)]
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


def steps_at(*begins: float) -> list[Operation]:
    """Return a backward pass of 50 milliseconds at each of these, on two ranks."""
    return [
        operation(rank, f"backward.{step}", begin * MILLISECOND, (begin + 50) * MILLISECOND, step)
        for rank in range(2)
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
    # A recording without steps.
    apart = [
        operation(rank, name, time * MILLISECOND, (time + 5) * MILLISECOND)
        for rank in (0, 1)
        for name, time in (("a", 0), ("b", 1000))
    ]
    assert folded(apart) == [(5, 1000)]
    assert folded([operation(0, "a", 0, 0), operation(0, "b", 9, 9)]) == []


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
        f"import runpy, sys; sys.modules.update(dict.fromkeys({without!r})); "
        "runpy.run_module('torch_ring.tracing', run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", program, "show", *arguments],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_it_draws_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install bokeh")
    write_timeline(tmp_path / "timeline.json", timeline_events(steps=2))
    done = show(str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "12 operations of 2 ranks" in done.stdout
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "gradients.0.1.0.0" in page or "gradients.0.0.0.0" in page
    assert '<script src="http' not in page
    assert main(["show", str(tmp_path)]) == 0  # its own page is no recording
    assert "left out" not in capsys.readouterr().out


def test_it_draws_operations_without_an_agreement(tmp_path: Path) -> None:
    """They have large numbers: not agreed on yet, or launched."""
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install bokeh")
    for rank in range(2):
        dump = dump_of(rank)
        dump["entries"][0]["collective_seq_id"] = 2**44 + 1
        dump["entries"][1]["collective_seq_id"] = 2**40 + 5
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


def test_a_wrong_command_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "has no timeline" in said
    assert "Traceback" not in said
    for value in ("-1", "inf", "soon"):
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["show", str(tmp_path), f"--late-ms={value}"])
        assert "--late-ms" in capsys.readouterr().err
