"""What a rank that is often late was found to do instead."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from logs import logged
from pool import run
from slow import on_shm_and_slowly_on_tcp
from torch.utils.data import DataLoader, Dataset

import torch_ring as hvd
from torch_ring import tracing
from torch_ring.world import current

LATE_S = 0.25
STEPS = 10


class SlowRows(Dataset[torch.Tensor]):
    """Rows that take long to load on rank 1."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LATE_S if hvd.rank() == 1 else 0.0)
        return torch.full((3,), float(index))


def load() -> str:
    for batch in DataLoader(SlowRows(), batch_size=1):
        hvd.allreduce(batch, name="x")
    return found()


def sleep() -> str:
    for _ in range(STEPS):
        time.sleep(LATE_S if hvd.rank() == 1 else 0.0)
        hvd.allreduce(torch.ones(3), name="x")
    return found()


def until(seconds: float) -> float:
    return time.monotonic() + (seconds if hvd.rank() == 1 else 0.0)


def multiply() -> str:
    large = torch.ones(200, 200)
    for _ in range(STEPS):
        end = until(LATE_S)
        while time.monotonic() < end:
            torch.chain_matmul(*[large] * 40)
        hvd.allreduce(torch.ones(3), name="x")
    return found()


def count_in_python() -> str:
    for _ in range(STEPS):
        end = until(LATE_S)
        while time.monotonic() < end:
            sum(i for i in range(1000))
        hvd.allreduce(torch.ones(3), name="x")
    return found()


def be_stopped() -> str:
    """Rank 1 stops itself before each operation; rank 0 lets it go on at times."""
    pids = hvd.allgather_object(os.getpid())
    has_ended = threading.Event()

    def let_go_on() -> None:
        while not has_ended.wait(2 * LATE_S):
            os.kill(pids[1], signal.SIGCONT)

    if hvd.rank() == 0:
        threading.Thread(target=let_go_on).start()
    for _ in range(STEPS):
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        hvd.allreduce(torch.ones(3), name="x")
    has_ended.set()
    return found()


def announce_in_another_order() -> str:
    """What the others have announced before is what they wait for at last, with no round open.

    If only one thread has ever submitted, they soon tell that they wait, by a round.
    """
    thread = threading.Thread(target=hvd.allreduce, args=(torch.ones(3),), kwargs={"name": "x"})
    thread.start()
    thread.join()
    for _ in range(STEPS):
        if hvd.rank() == 1:
            hvd.allreduce(torch.ones(3), name="second")
            time.sleep(LATE_S)
            hvd.allreduce(torch.ones(3), name="first")
        else:
            first = hvd.allreduce_async(torch.ones(3), name="first")
            second = hvd.allreduce_async(torch.ones(3), name="second")
            hvd.synchronize(second)
            hvd.synchronize(first)
    return found()


class Garbled:
    """A control plane whose answers are no UTF-8."""

    def __init__(self, plane: Any) -> None:
        self._plane = plane

    def answer(self, rank: int, number: int, _: str) -> None:
        self._plane.answer(rank, number, b"asleep\nin \xff")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)


def answer_no_text() -> str:
    inquiries: Any = current.world().inquiries
    inquiries._plane = Garbled(inquiries._plane)
    return sleep()


def test_an_answer_that_is_no_text_ends_nothing() -> None:
    assert "(at last in \ufffd)" in run(answer_no_text, 2)[0]


def wait_for_the_minutes_line() -> list[str]:
    """Rank 2 is late until rank 0 has logged that it is."""
    has_told = torch.zeros(1)
    with logged() as lines:
        while not has_told:
            time.sleep(LATE_S if hvd.rank() == 2 else 0.0)
            said = [line for line in lines if "was last in" in line]
            has_told = hvd.allreduce(torch.tensor([float(len(said))]), op=hvd.Sum, name="x")
    return said


@pytest.mark.slow
def test_what_a_late_rank_did_is_logged_once_a_minute() -> None:
    first, *others = run(wait_for_the_minutes_line, 3, deadline_s=200)
    (line,) = first
    assert re.match(
        r"rank 2 was last in \d+ % of the \d+ agreements for which rank 0 waited 10 ms or more in "
        r"the last minute, by \d+ ms in the median \(docs/tracing.md\)",
        line,
    )
    assert "When it was looked at while it was late, it was asleep in " in line
    assert "(at last in wait_for_the_minutes_line (" in line
    assert others == [[], []]


def found() -> str:
    """Return what rank 0 knows of rank 1."""
    hvd.barrier()
    late = tracing.stragglers(min_lag_s=LATE_S / 3) if hvd.rank() == 0 else []
    hvd.barrier()
    return late[0].instead if late else ""


def until_it_is_seen(late: Callable[[], str], what: str) -> str:
    """On a busy machine, a rank is at times late for another reason, or has no core to answer."""
    for _ in range(6):
        seen = late()
        if what in hvd.broadcast_object(seen, root_rank=0):
            break
    return seen


@on_shm_and_slowly_on_tcp
@pytest.mark.parametrize(
    ("late", "what", "where"),
    [
        (load, "waiting for data in ", "in __getitem__ ("),
        (sleep, "asleep in ", "in sleep ("),
        (announce_in_another_order, "asleep in ", "in announce_in_another_order ("),
        (multiply, "computing in ", "in "),
        (count_in_python, "in Python in ", "in "),
        (be_stopped, "not answering in ", ""),
    ],
)
def test_what_a_late_rank_does_instead(late, what, where, transport: str) -> None:
    first, *others = run(until_it_is_seen, 3, transport=transport, args=(late, what))
    assert what in first
    assert where in first
    took = re.search(r" looks, or (\d+) ms", first)
    assert took, first
    assert LATE_S / 4 < int(took[1]) / 1000 < 3 * LATE_S, first
    assert others == ["", ""]
