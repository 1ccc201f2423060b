# SPDX-License-Identifier: Apache-2.0
"""Stopped or disconnected ranks end when the others go on without them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import namespaces
import pool
import pytest
from namespaces import Host

import torch_ring as hvd

pytestmark = pytest.mark.slow  # each waits for a heartbeat timeout, and more

HEARTBEAT = {"TORCH_RING_HEARTBEAT_TIMEOUT": "2"}


def stop_and_continue(folder: str) -> str:
    """Rank 2 is stopped until the others train without it; they train until it has noticed."""
    name, state = hvd.rank(), hvd.elastic.ObjectState(step=0)
    pids = hvd.allgather_object(os.getpid())
    has_left = Path(folder) / "has left"

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        is_over = False
        while not is_over:
            if name == 0 and hvd.size() == 3 and state.step == 3:
                os.kill(pids[2], signal.SIGSTOP)
            if name == 0 and hvd.size() == 2:
                os.kill(pids[2], signal.SIGCONT)
            state.step += 1
            is_over = hvd.broadcast_object(has_left.exists())

    try:
        return end_of(train, state)
    finally:
        if name == 2:
            has_left.touch()


def end_of(train: object, state: hvd.elastic.ObjectState) -> str:
    kind, text = pool.error_of(lambda: train(state))  # type: ignore[operator]
    return f"{hvd.rank()} of {hvd.size()}" if kind == "nothing" else f"{kind}: {text}"


def test_a_stopped_rank_that_comes_back_leaves(tmp_path: Path) -> None:
    results = pool.run(stop_and_continue, 3, args=(str(tmp_path),), env=HEARTBEAT)
    assert results[:2] == ["0 of 2", "1 of 2"]
    assert results[2].startswith("LeftOutError: the other ranks go on without this one"), results


@pytest.fixture
def two_hosts() -> Iterator[Sequence[Host]]:
    try:
        with namespaces.hosts(2) as hosts:
            yield hosts
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")


def cut_off(host: Host) -> tuple[str, int]:
    """Cut a host off in step 3; return this rank's end, and the steps that it has taken."""
    name, size, state = hvd.rank(), hvd.size(), hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        for state.step in range(state.step, 6):
            if (name, hvd.size(), state.step) == (0, size, 3):
                host.cut_off()
            hvd.barrier()

    return end_of(train, state), state.step


@pytest.mark.netns
def test_the_side_with_most_ranks_goes_on_and_the_other_ends(two_hosts: Sequence[Host]) -> None:
    """Without rank 0. tests/elastic/test_regroup.py has two halves."""
    first, second = two_hosts
    alone, *others = pool.run(
        cut_off,
        3,
        args=(second,),
        transport="",
        env={"MASTER_ADDR": first.address, **HEARTBEAT},
        namespaces=[first.namespace, second.namespace, second.namespace],
    )
    assert others == [("0 of 2", 5), ("1 of 2", 5)]
    end, step = alone
    assert end.startswith("LeftOutError: ")
    assert "may live, and continue: these ranks end" in end
    assert step in (3, 4)  # the last messages of the others may have come before the cut
