"""The rank for which the others wait, and the counters of a rank."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import namespaces
import pytest
import torch
from logs import logged
from pool import eventually, has_asked, run
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring import tracing
from torch_ring.tracing.lateness import Straggler
from torch_ring.world import current

LATE_S = 0.2
STEPS = 20
HAS_NAMESPACES = os.geteuid() == 0 and shutil.which("ip") is not None
BUCKETS = {"TORCH_RING_BUCKET_BYTES": "20000"}  # one of each layer below


class Waits(torch.autograd.Function):
    """The identity; its backward waits."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
        ctx.wait = wait
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.wait()
        return gradient, None


def passes_asked_for() -> int:
    """Return the number of passes whose final message this rank has submitted."""
    return sum(record.name.startswith("backward.") for record in current.engine().records())


def train(late: int, folder: Path, init: bool) -> list[Straggler]:
    """Train some steps; `late` sleeps in each backward, before it has the gradients of layer 0.

    It begins to sleep when all others wait for it: a busy machine may make them late, too.
    """
    if init:
        hvd.init()

    def tell() -> None:
        for step in range(STEPS):
            assert eventually(lambda: passes_asked_for() > step)  # noqa: B023
            (folder / f"{step} {hvd.rank()}").touch()

    def be_late(step: int) -> None:
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
        values = Waits.apply(layers[0](torch.randn(8, 64)), partial(be_late, step))
        optimizer.zero_grad()
        layers[2](layers[1](values)).square().mean().backward()
        optimizer.step()
    if hvd.rank() != late:
        telling.join()
    hvd.barrier()  # reveals the last rank of the previous operation
    found = tracing.stragglers(min_lag_s=LATE_S / 2)
    hvd.barrier()
    if init:
        hvd.shutdown()
    return found


def check(found: list[list[Straggler]], late: int, operation: str) -> None:
    """Check that all others name the late rank, and that the late one names no rank."""
    for rank, stragglers in enumerate(found):
        if rank == late:
            assert stragglers == []
            continue
        (straggler,) = stragglers
        assert straggler.rank == late, found
        assert straggler.last >= STEPS - 2, found
        assert straggler.median_s > LATE_S / 2, found
        assert operation in straggler.operation, found


def test_a_rank_that_sleeps_in_backward_is_named_on_shared_memory(tmp_path: Path) -> None:
    late = 3
    found = run(train, 4, args=(late, tmp_path, False), env=BUCKETS)
    check(found, late, "the end of a backward pass")


@pytest.mark.slow
def test_a_rank_that_sleeps_in_backward_is_named_with_its_bucket_on_tcp(tmp_path: Path) -> None:
    late = 0
    found = run(train, 4, args=(late, tmp_path, False), env=BUCKETS, transport="tcp")
    check(found, late, "bucket")


@pytest.mark.skipif(not HAS_NAMESPACES, reason="network namespaces need root and `ip` (iproute2)")
@pytest.mark.slow
def test_a_rank_that_sleeps_in_backward_is_named_with_its_bucket_on_two_hosts(
    hosts: list[str], tmp_path: Path
) -> None:
    late = 2  # the first of the second host
    found = run(
        train,
        4,
        args=(late, tmp_path, True),
        initialized=False,
        transport="",
        env=BUCKETS | {"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": "29437"},
        namespaces=[hosts[0], hosts[0], hosts[1], hosts[1]],
    )
    check(found, late, "bucket")


def take_turns() -> list[Straggler]:
    values = torch.ones(3)
    for step in range(8 * hvd.size()):
        if step % hvd.size() == hvd.rank():
            time.sleep(0.1)
        hvd.allreduce(values, name="x")
    hvd.barrier()  # reveals the last rank
    return tracing.stragglers()


@pytest.mark.slow
@on_both_transports
def test_ranks_that_are_late_in_turn_are_not_named(transport: str) -> None:
    assert run(take_turns, 3, transport=transport) == [[], [], []]


def announce_while_data_move() -> list[Straggler]:
    """Rank 0 announces "small" before "large"; rank 1 announces it when its data have moved."""
    large, small = torch.ones(32 << 20), torch.ones(3)
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


def wait_for_the_minutes_line(late: int) -> list[str]:
    """One rank is late until rank 0 has logged that it is."""
    has_told = torch.zeros(1)
    with logged() as lines:
        while not has_told:
            time.sleep(0.25 if hvd.rank() == late else 0.0)
            said = [line for line in lines if "was last in" in line]
            has_told = hvd.allreduce(torch.tensor([float(len(said))]), op=hvd.Sum, name="x")
    return said


@pytest.mark.slow
def test_a_late_rank_is_logged_once_a_minute() -> None:
    late = 2
    first, *others = run(wait_for_the_minutes_line, 3, args=(late,), deadline_s=200)
    (line,) = first
    assert re.fullmatch(
        rf"rank {late} was last in \d+ % of the \d+ agreements for which a rank waited 10 ms or "
        r"more in the last minute, by \d+ ms in the median \(docs/tracing.md\)",
        line,
    )
    assert not any(others)


def count(asked: Path) -> None:
    before = tracing.snapshot()
    assert (before.rank, before.size) == (hvd.rank(), hvd.size())
    barriers = before.sets[0].operations["barrier"].operations
    if hvd.rank() == 1:
        assert eventually(asked.exists)
        time.sleep(0.1)
    else:
        threading.Thread(target=lambda: eventually(has_asked) and asked.touch()).start()
    for _ in range(3):
        hvd.allreduce(torch.ones(10), name="x")
    hvd.allreduce(torch.ones(100_000), name="x")
    hvd.barrier()
    with pytest.raises(hvd.MismatchError):
        hvd.broadcast(torch.ones(3 + hvd.rank()), 0, name="y")
    after = tracing.snapshot().sets[0]
    assert after.ranks == (0, 1)
    reduced = after.operations["allreduce"]
    assert (reduced.operations, reduced.failed, reduced.bytes) == (4, 0, 3 * 40 + 400_000)
    assert reduced.running_s > 0
    assert reduced.waiting_s > (0.05 if hvd.rank() == 0 else 0)
    assert after.operations["barrier"].operations == barriers + 1
    assert after.operations["broadcast"].failed == 1
    assert after.inlined >= 4
    assert after.fused == 0
    lag = after.lag
    assert len(lag.counts) == len(lag.bounds_s) + 1
    assert sum(lag.counts) == sum(each.operations for each in after.operations.values())
    waits = sum(n for n, bound in zip(lag.counts[1:], lag.bounds_s, strict=True) if bound >= 0.05)
    assert (waits >= 1 and lag.sum_s > 0.05) if hvd.rank() == 0 else True


@on_both_transports
def test_snapshot_counts(transport: str, tmp_path: Path) -> None:
    run(count, 2, args=(tmp_path / "asked",), transport=transport)


def test_without_a_world() -> None:
    for function in (tracing.snapshot, tracing.stragglers, lambda: tracing.dump("x")):
        with pytest.raises(ValueError, match="init"):
            function()
