# SPDX-License-Identifier: Apache-2.0
"""The line after 20 steps that wait for gradients from other hosts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import namespaces
import pytest
import torch
from logs import logged
from pool import run
from torch import nn
from torch.optim import SGD

import torch_ring as hvd
from torch_ring.optimizer.slow_links import AFTER_STEPS, advice

MS = 1_000_000  # ns
MB = 1_000_000


def passes(
    count: int, *, agreed_ms: float, buckets: int = 2, begin_ms: float = 0, **more: Any
) -> list[Any]:
    """Return what the flight recorder has of passes of 1000 ms.

    At 400 the first bucket is there, at 500 all are. From `agreed_ms` on they travel, 200 ms each.
    """
    common = {"operation": "allreduce", "state": "finished", "transport": "tcp", "bytes": 2 * MB}
    records = []

    def add(name: str, *times_ms: float, **more: Any) -> None:
        fields = ("submitted_ns", "agreed_ns", "finished_ns")
        times = {field: round(ms * MS) for field, ms in zip(fields, times_ms, strict=True)}
        records.append(SimpleNamespace(name=name, **(common | times | more)))

    for number in range(count):
        at = begin_ms + 1000 * number
        for bucket in range(buckets):
            begin = at + agreed_ms + 200 * bucket
            add(f"gradients.0.{number}.{bucket}.0", at + 400, begin, begin + 200, **more)
        add(f"backward.{number}", at + 500, at + agreed_ms, at + agreed_ms, bytes=20)
    return records


def test_what_travels_after_backward_is_waited_for():
    line = advice(passes(20, agreed_ms=500), steps=20, passes=20, hosts=2)
    assert line == (
        "steps take 1.0 s, of which 400 ms (40 %) wait for gradients from other hosts, 4 MB a step "
        "at 10 MB/s: docs/slow-links.md says how to send less"
    )
    line = advice(passes(20, agreed_ms=500), steps=10, passes=20, hosts=4)
    assert line is not None
    assert line.startswith("steps take 2.0 s, of which 800 ms (40 %) wait for gradients from other")
    assert ", 12 MB a step at 15 MB/s:" in line
    gathered = passes(20, agreed_ms=500, operation="allgather", transport="shm+tcp")
    line = advice(gathered, steps=20, passes=20, hosts=4)
    assert line is not None
    assert ", 12 MB a step at 30 MB/s:" in line


@pytest.mark.parametrize(
    ("records", "steps"),
    [
        ([], 20),
        (passes(20, agreed_ms=400, buckets=1), 20),  # half of it travels during the pass
        (passes(20, agreed_ms=500, buckets=1), 20),  # a fifth of a step
        (passes(20, agreed_ms=900, buckets=0), 20),  # the other ranks are late
        (passes(20, agreed_ms=500, transport="shm"), 20),
        (passes(20, agreed_ms=500), 2000),  # of a step it is less than 10 ms
    ],
)
def test_no_line_where_nothing_is_to_be_gained(records, steps):
    assert advice(records, steps=steps, passes=len(records) // 3 or 1, hosts=2) is None


def test_passes_count_anew_after_join():
    before = passes(30, agreed_ms=500, buckets=1)
    after = passes(20, agreed_ms=500, begin_ms=50_000)
    line = advice([*before, *after], steps=20, passes=20, hosts=2)
    assert line == advice(after, steps=20, passes=20, hosts=2)
    assert line is not None


def train(steps: int, optimizers: int) -> list[str]:
    """Return the lines about slow links."""
    weights = [nn.Parameter(torch.zeros(25_000)) for _ in range(optimizers)]
    made = [hvd.DistributedOptimizer(SGD([weight], lr=0.1)) for weight in weights]
    with logged() as lines:
        for _ in range(steps):
            for optimizer in made:
                optimizer.zero_grad()
            sum(weight.sum() for weight in weights).backward()
            for optimizer in made:
                optimizer.step()
    return [line for line in lines if "slow-links" in line]


def train_on_and_on() -> list[list[str]]:
    return [train(AFTER_STEPS - 1, 1), train(AFTER_STEPS, 2), train(AFTER_STEPS, 1)]


@pytest.mark.slow
@pytest.mark.netns
def test_rank_0_logs_one_line_in_a_world_of_hosts():
    """A link of 10 Mbit/s between two hosts, on which 100 KB take 80 ms."""
    try:
        with namespaces.hosts(2, rate="10mbit") as hosts:
            results = run(
                train_on_and_on,
                3,
                transport="",
                env={"MASTER_ADDR": hosts[0].address},
                namespaces=[hosts[host].namespace for host in (0, 0, 1)],
            )
    except OSError as error:
        if "netns add" not in str(error):
            raise
        pytest.skip(f"no network namespaces here: {error}")
    for rank, (too_few, enough, later) in enumerate(results):
        assert (too_few, later) == ([], [])
        assert len(enough) == (rank == 0), enough
    (line,) = results[0][1]
    assert line.startswith("steps take ")
    assert " wait for gradients from other hosts, " in line
    assert line.endswith("MB/s: docs/slow-links.md says how to send less")


def test_no_line_on_one_host():
    assert run(train_on_and_on, 2) == [[[]] * 3] * 2
