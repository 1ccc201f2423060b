"""Input files of the page: timelines, including unfinished ones, dumps, and others."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from recordings import MILLISECOND, dump_of, failed_dump, timeline_events, write_timeline

from torch_ring._C import COLLECTIVES
from torch_ring.tracing.page.charts import COLORS
from torch_ring.tracing.page.document import draw_page
from torch_ring.tracing.page.recording import (
    KINDS,
    NothingToShowError,
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


@pytest.mark.parametrize("text", ["", "hello", "7", '{"a": 1}', "[\nx,\ny,\nz"])
def test_what_is_no_trace(text: str) -> None:
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


def test_a_pickled_dump_as_torch_writes_it(tmp_path: Path) -> None:
    dump = dump_of(rank=0)
    del dump["rank"]
    (tmp_path / "flight_3").write_bytes(pickle.dumps(dump))
    assert read_recording(tmp_path).ranks == [3]


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
    assert "<td>rank 0: the ranks &lt;disagree&gt;</td>" in card
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
    assert read_recording(tmp_path).ranks == [12]
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


@pytest.mark.parametrize("missing", ["ts", "pid"])
def test_an_event_that_lacks_something(tmp_path: Path, missing: str) -> None:
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
