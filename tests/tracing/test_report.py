"""The present operations of the ranks: report(), and the log of a long wait."""

from __future__ import annotations

import io
import linecache
import logging
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import eventually, run
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring import tracing
from torch_ring.tracing.lateness import RankReport, main_thread_stack
from torch_ring.world import current

PATIENCE_S = 20.0  # for the answers of running ranks


def load_a_batch(until: Path) -> None:
    """Be late until there is a file."""
    until.with_name("late").touch()
    assert eventually(until.exists)


def report_of_a_late_rank(seen: Path) -> list[RankReport] | None:
    hvd.barrier()
    if hvd.rank() == 1:
        load_a_batch(seen)
        hvd.allreduce(torch.ones(3), name="loss")
        return None
    handle = hvd.allreduce_async(torch.ones(3), name="loss")
    seen.with_name(f"asked-{hvd.rank()}").touch()
    found = []
    if hvd.rank() == 0:
        places = [seen.with_name(name) for name in ("late", "asked-2")]
        assert eventually(lambda: all(place.exists() for place in places))
        found = tracing.report(PATIENCE_S)
        seen.touch()
    hvd.synchronize(handle)
    return found


@on_both_transports
def test_report_says_where_every_rank_is(transport: str, tmp_path: Path) -> None:
    found = run(report_of_a_late_rank, 3, transport=transport, args=(tmp_path / "seen",))[0]
    assert [each.rank for each in found] == [0, 1, 2]
    asks, late, waits = (each.text for each in found)
    assert "in allreduce 'loss'" in asks
    assert late.startswith("in no collective; its main thread is in ")
    assert "called in load_a_batch (" in late or "is in load_a_batch (" in late
    assert ", called in report_of_a_late_rank (" in late
    assert "in allreduce 'loss'" in waits
    assert "in report_of_a_late_rank (" in waits


def report_of_a_stopped_rank() -> list[RankReport]:
    pids = hvd.allgather_object(os.getpid())
    found: list[RankReport] = []
    if hvd.rank() == 0:
        os.kill(pids[1], signal.SIGSTOP)
        while not found or found[2].text is None:  # rank 2 may need longer on a busy machine
            found = tracing.report(timeout_s=0.5)
        os.kill(pids[1], signal.SIGCONT)
    hvd.barrier()
    return found


def test_a_rank_that_does_not_answer_is_said_so() -> None:
    found = run(report_of_a_stopped_rank, 3)[0]
    assert [each.text is None for each in found] == [False, True, False]
    assert str(found[1]) == "rank 1: has not answered"


def report_within_a_long_name() -> str:
    if hvd.rank() == 1:
        hvd.barrier()
        hvd.allreduce(torch.ones(1), name="x" * 3000)
        return ""
    handle = hvd.allreduce_async(torch.ones(1), name="x" * 3000)
    text = tracing.report(PATIENCE_S)[0].text or ""
    hvd.barrier()
    hvd.synchronize(handle)
    return text


def test_a_long_name_leaves_room_for_the_place() -> None:
    text = run(report_within_a_long_name, 2)[0]
    assert "xxx; its main thread is in report_within_a_long_name (" in text, text[-300:]
    assert len(text.encode()) <= 4096


class Kept:
    """An object of a function whose stack another thread requests."""


def test_a_place_that_is_asked_for_keeps_no_object_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_looked, has_returned = threading.Event(), threading.Event()

    def read_slowly(*_: object) -> None:  # the lines of a file
        has_looked.set()
        assert has_returned.wait(20)

    def ask() -> None:
        places.extend(main_thread_stack())
        has_looked.set()

    def be_asked() -> weakref.ref[Kept]:
        kept = Kept()
        asker.start()
        assert has_looked.wait(20)
        return weakref.ref(kept)

    monkeypatch.setattr(linecache, "checkcache", read_slowly)
    places: list[dict[str, Any]] = []
    asker = threading.Thread(target=ask)
    kept = be_asked()
    is_gone = kept() is None
    has_returned.set()
    asker.join()
    assert is_gone
    assert "be_asked" in [place["name"] for place in places]


class Garbled:
    """A control plane whose answers are no UTF-8."""

    def __init__(self, plane: Any) -> None:
        self._plane = plane

    def answer(self, rank: int, number: int, _: str) -> None:
        self._plane.answer(rank, number, b"asleep in \xff")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)


def report_of_no_text() -> list[str | None]:
    queries: Any = current.world().queries
    queries._plane = Garbled(queries._plane)
    hvd.barrier()
    said = tracing.report(PATIENCE_S) if hvd.rank() == 0 else []
    hvd.barrier()
    return [each.text for each in said]


def test_an_answer_that_is_no_text_ends_nothing() -> None:
    assert run(report_of_no_text, 2)[0][1] == "asleep in \ufffd"


def report_alone() -> str:
    return str(tracing.report()[0])


def test_a_world_of_one_reports_itself() -> None:
    assert run(report_alone, 1)[0].startswith("rank 0: in no collective; its main thread is in ")


def wait_for_a_late_rank(seen: Path) -> str:
    stream = io.StringIO()
    log = logging.getLogger("torch_ring")
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    hvd.barrier()
    if hvd.rank() == 1:
        load_a_batch(seen)
    asked = seen.with_name("rank 0 has asked")
    if hvd.rank() == 2:  # or it may be the first to wait, and so the one that asks the others
        assert eventually(asked.exists)
    handle = hvd.allreduce_async(torch.ones(3), name="loss")
    if hvd.rank() == 0:
        asked.touch()
        assert eventually(lambda: "load_a_batch" in stream.getvalue(), 20.0), stream.getvalue()
        seen.touch()
    hvd.synchronize(handle)
    hvd.barrier()
    log.removeHandler(handler)
    return stream.getvalue()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_stack_of_a_late_rank_is_logged_by_one_rank(transport: str, tmp_path: Path) -> None:
    env = {"TORCH_RING_STALL_WARNING": "0.5", "TORCH_RING_TIMEOUT": "0"}
    args = (tmp_path / "seen",)
    logs = run(wait_for_a_late_rank, 3, transport=transport, env=env, args=args)
    assert "has waited" in logs[0]
    assert "rank 1 (" in logs[0]
    assert "in no collective; its main thread is in " in logs[0]
    assert "load_a_batch" not in logs[2]
