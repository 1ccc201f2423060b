# SPDX-License-Identifier: Apache-2.0
"""The rank for which the others wait, and the present operations of the ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from logs import logged
from pool import eventually, run
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring import tracing
from torch_ring.tracing.lateness import RankReport, Straggler
from torch_ring.world import current

LATE_S = 0.2
STEPS = 6
BUCKETS = {"TORCH_RING_BUCKET_BYTES": "20000"}  # one of each layer below


def passes_asked_for() -> int:
    """Return the number of passes whose final message this rank has submitted."""
    return sum(record.name.startswith("backward.") for record in current.engine().records())


def train(late: int, folder: Path) -> list[Straggler]:
    """Train some steps; `late` sleeps in each backward, before it has the gradients of layer 0.

    It begins to sleep when all others wait for it: a busy machine may make them late, too.
    """

    def tell() -> None:
        for step in range(STEPS):
            assert eventually(lambda: passes_asked_for() > step)  # noqa: B023
            (folder / f"{step} {hvd.rank()}").touch()

    def be_late(step: int, _: torch.Tensor) -> None:
        if hvd.rank() == late:
            asked = [folder / f"{step} {rank}" for rank in range(hvd.size()) if rank != late]
            assert eventually(lambda: all(file.exists() for file in asked))
            time.sleep(LATE_S)

    telling = threading.Thread(target=tell)
    if hvd.rank() != late:
        telling.start()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers.parameters(), lr=0.01), layers.named_parameters()
    )
    for step in range(STEPS):
        values = layers[0](torch.randn(8, 64))
        values.register_hook(partial(be_late, step))
        optimizer.zero_grad()
        layers[2](layers[1](values)).square().mean().backward()
        optimizer.step()
    if hvd.rank() != late:
        telling.join()
    hvd.barrier()  # reveals the last rank of the previous operation
    found = tracing.stragglers(min_lag_s=LATE_S / 2)
    hvd.barrier()
    return found


@pytest.mark.parametrize(
    ("transport", "late", "operation"),
    [("shm", 3, "the end of a backward pass"), ("tcp", 0, "bucket")],
)
def test_a_rank_that_sleeps_in_backward_is_named(
    tmp_path: Path, transport: str, late: int, operation: str
) -> None:
    """The others name the late rank, and the late one names no rank."""
    found = run(train, 4, args=(late, tmp_path), env=BUCKETS, transport=transport)
    for rank, stragglers in enumerate(found):
        if rank == late:
            assert stragglers == []
            continue
        (straggler,) = stragglers
        assert straggler.rank == late, found
        assert straggler.last >= STEPS - 2, found
        assert straggler.median_s > LATE_S / 2, found
        assert operation in straggler.operation, found


def take_turns() -> list[Straggler]:
    values = torch.ones(3)
    for step in range(4 * hvd.size()):
        if step % hvd.size() == hvd.rank():
            time.sleep(0.1)
        hvd.allreduce(values, name="x")
    hvd.barrier()  # reveals the last rank
    return tracing.stragglers()


def test_ranks_that_are_late_in_turn_are_not_named() -> None:
    assert run(take_turns, 3) == [[], [], []]


def be_late_once() -> list[Straggler]:
    """Rank 1 is late for five operations that the ranks agree on together."""
    if hvd.rank() == 1:
        time.sleep(LATE_S)
    hvd.grouped_allreduce([torch.ones(3)] * 5, name="x")
    hvd.barrier()
    return tracing.stragglers(min_lag_s=LATE_S / 2)


def test_operations_that_were_agreed_on_together_count_once() -> None:
    assert run(be_late_once, 2) == [[], []]


def announce_while_data_move() -> list[Straggler]:
    """Rank 0 announces "small" before "large"; rank 1 announces it when its data have moved."""
    large, small = torch.ones(8 << 20), torch.ones(3)
    for _ in range(5):
        if hvd.rank() == 0:
            first = hvd.allreduce_async(small, name="small")
            second = hvd.allreduce_async_(large, name="large")
            hvd.synchronize(second)
            hvd.synchronize(first)
        else:
            hvd.allreduce_(large, name="large")
            hvd.allreduce(small, name="small")
    hvd.barrier()
    moved_ns = [
        record.finished_ns - record.agreed_ns
        for record in current.engine().records()
        if record.name == "large"
    ]
    return tracing.stragglers(min_lag_s=min(moved_ns) / 2e9)


def test_the_time_in_which_data_move_is_charged_to_no_rank() -> None:
    assert run(announce_while_data_move, 2, transport="tcp") == [[], []]


PATIENCE_S = 20.0  # for the answers of running ranks


def load_a_batch(until: Path) -> None:
    """Be late until there is a file."""
    until.with_name("late").touch()
    assert eventually(until.exists)


def report_of_a_late_rank(seen: Path) -> list[RankReport] | None:
    hvd.barrier()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="loss")
        places = [seen.with_name(name) for name in ("late", "asked-2")]
        assert eventually(lambda: all(place.exists() for place in places))
        found = tracing.report(PATIENCE_S)
        seen.touch()
        current.engine().send(torch.ones(4), 2, 9).wait()
        hvd.synchronize(handle)
        return found
    if hvd.rank() == 1:
        load_a_batch(seen)
    else:
        message = current.engine().receive(torch.empty(4), 0, 9)
        seen.with_name("asked-2").touch()
        message.wait()
    hvd.allreduce(torch.ones(3), name="loss")
    return None


@on_both_transports
def test_report_says_where_every_rank_is(transport: str, tmp_path: Path) -> None:
    found = run(report_of_a_late_rank, 3, transport=transport, args=(tmp_path / "seen",))[0]
    assert [each.rank for each in found] == [0, 1, 2]
    asks, late, waits = (each.text for each in found)
    assert "in allreduce 'loss'" in asks
    assert late.startswith("in no collective; its main thread is in ")
    assert "called in load_a_batch (" in late or "is in load_a_batch (" in late
    assert ", called in report_of_a_late_rank (" in late
    assert waits.startswith("in receive of float32, 16 bytes, tag 9, from rank 0; ")
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


def report_from_below(depth: int) -> str:
    """Return this rank's text, from below many calls."""
    return report_from_below(depth - 1) if depth else tracing.report(PATIENCE_S)[0].text or ""


def report_within_a_long_name() -> str:
    if hvd.rank() == 1:
        hvd.barrier()
        hvd.allreduce(torch.ones(1), name="x" * 3000)
        return ""
    handle = hvd.allreduce_async(torch.ones(1), name="x" * 3000)
    text = report_from_below(100)
    hvd.barrier()
    hvd.synchronize(handle)
    return text


def test_a_long_name_and_many_calls_leave_room_for_the_place() -> None:
    text = run(report_within_a_long_name, 2)[0]
    assert "xxx; its main thread is in report_from_below (" in text, text[-300:]
    assert len(text.encode()) <= 4096
    assert text.endswith(", ...")


def wait_for_a_late_rank(seen: Path) -> str:
    with logged() as lines:
        hvd.barrier()
        if hvd.rank() == 1:
            load_a_batch(seen)
        asked = seen.with_name("rank 0 has asked")
        if hvd.rank() == 2:  # or it may be the first to wait, and so the one that asks the others
            assert eventually(asked.exists)
        handle = hvd.allreduce_async(torch.ones(3), name="loss")
        if hvd.rank() == 0:
            asked.touch()
            assert eventually(lambda: "load_a_batch" in "".join(lines), 20.0), lines
            seen.touch()
        hvd.synchronize(handle)
        hvd.barrier()
    return "\n".join(lines)


def test_the_stack_of_a_late_rank_is_logged_by_one_rank(tmp_path: Path) -> None:
    env = {"TORCH_RING_STALL_WARNING": "0.5", "TORCH_RING_TIMEOUT": "0"}
    args = (tmp_path / "seen",)
    logs = run(wait_for_a_late_rank, 3, env=env, args=args)
    assert "has waited" in logs[0]
    assert "rank 1 (" in logs[0]
    assert "in no collective; its main thread is in " in logs[0]
    assert "load_a_batch" not in logs[2]
