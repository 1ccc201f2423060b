# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of batches: errors that say so, without torch_ring's own names."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from logs import logged
from pool import all_have_passed, error_of, eventually, run
from torch.optim import SGD
from training import make_model

import torch_ring as hvd

REMEDY = (
    "has it fewer batches, or has it stopped early? Give all ranks equally many (drop_last=True in "
    "the sampler and the loader, or equal shards), or let a rank that has no more call join(); let "
    "all ranks stop together, as any_rank() lets them"
)
MANY_BUCKETS = {"TORCH_RING_BUCKET_BYTES": "256"}


def make_step(kind: str) -> Callable[[], None]:
    """Return a function that takes one training step."""
    models = [make_model(), make_model()] if kind == "two optimizers" else [make_model()]
    op = hvd.Adasum if kind == "adasum" else hvd.Average
    optimizers = [hvd.DistributedOptimizer(SGD(m.parameters(), lr=0.1), op=op) for m in models]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(model(torch.ones(2, 8)).sum() for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def leave_early(batches: int, kind: str, joins: bool) -> tuple[str, str]:
    """The last rank has only `batches` batches. Return the error of the others.

    With `joins` it joins early, and leaves in the next epoch.
    """
    step, is_last = make_step(kind), hvd.rank() == hvd.size() - 1
    if joins:
        for _ in range(3 - hvd.rank()):
            step()
        hvd.join()
    for _ in range(batches):
        step()
    if is_last:
        hvd.shutdown()
        return "", ""
    return error_of(step)


@pytest.mark.parametrize(
    ("transport", "size", "env", "kind", "joins", "batches", "number", "done"),
    [
        ("shm", 2, {}, "one", False, 0, 1, "0 backward passes"),
        ("tcp", 3, {}, "one", False, 1, 2, "1 backward pass"),
        ("tcp", 2, MANY_BUCKETS, "one", False, 3, 4, "3 backward passes"),
        # The step of the second optimizer agrees once more, and counts as a pass.
        ("shm", 2, {}, "two optimizers", False, 2, 5, "4 backward passes"),
        ("shm", 2, {}, "one", True, 1, 2, "1 backward pass since join()"),
        ("shm", 2, {}, "adasum", False, 2, 0, "2 optimizer steps"),
        ("shm", 2, {}, "adasum", True, 1, 0, "1 optimizer step since join()"),
    ],
)
def test_a_rank_that_has_left(transport, size, env, kind, joins, batches, number, done):
    """Another rank, or this rank's own buckets, may report it."""
    outcomes = run(leave_early, size, args=(batches, kind, joins), transport=transport, env=env)
    left = rf"rank {size - 1} \(pid \d+\) has left: it called shutdown\(\) or exited"
    purpose = f"averaging the gradients of backward pass {number}" if number else ".*"
    for error, text in outcomes[:-1]:
        assert error == "PeerLostError", text
        assert re.match(rf"rank \d: {purpose}: (.* )?{left}\. ", text), text
        assert text.endswith(f" The rank that has left did {done}: {REMEDY}")
        assert "allgather" not in text


def die(passed: Path) -> tuple[str, str]:
    step = make_step("one")
    step()
    all_have_passed(passed, hvd.size())
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(step)


def test_a_rank_that_has_died_had_no_fewer_batches(tmp_path):
    (kind, text), _ = run(die, 2, args=(tmp_path,), may_die={1})
    assert kind == "PeerLostError", text
    assert text.startswith("rank 0: averaging the gradients of backward pass 2"), text
    assert ": rank 1 (pid" in text
    assert "batches" not in text


def ask_meanwhile() -> tuple[str, str]:
    """Rank 1 has one batch less, and waits in another collective; then both train on."""
    step = make_step("one")
    step()
    error = error_of(step if hvd.rank() == 0 else lambda: hvd.any_rank(False))
    step()
    return error


def test_a_rank_in_another_collective():
    env = {"TORCH_RING_TIMEOUT": "4"}  # the ranks wait three quarters of that, as they have threads
    trains, waits = run(ask_meanwhile, 2, env=env)
    for kind, text in (trains, waits):
        assert kind == "MismatchError", text
        assert re.search(r"rank 0 \(pid \d+\): averaging the gradients of backward pass 2", text)
        assert re.search(r"rank 1 \(pid \d+\): allreduce 'any_rank' bool \[\] Max", text)
        assert "'backward." not in text
    assert REMEDY in trains[1]
    assert "a collective that only some ranks call, as under `if rank() == 0:`" in trains[1]
    assert "All ranks have done 1 backward pass, " in trains[1]
    assert REMEDY not in waits[1]


def come_late(given_up: Path) -> tuple[tuple[str, str], list[str]]:
    step = make_step("one")
    step()
    if hvd.rank() == 1:
        assert eventually(given_up.exists)
    with logged() as messages:
        error = error_of(step)
    given_up.touch()
    return error, messages


def test_a_late_rank(tmp_path):
    env = {"TORCH_RING_TIMEOUT": "1.5", "TORCH_RING_STALL_WARNING": "0.5"}
    ((kind, text), messages), _ = run(come_late, 2, args=(tmp_path / "given up",), env=env)
    assert kind == "TimeoutError", text
    assert re.match(r"rank 0: averaging the gradients of backward pass 2.*: rank 1 \(pid", text)
    assert text.endswith(f"All ranks have done 1 backward pass, one does not do the next: {REMEDY}")
    assert any("for averaging the gradients of backward pass 2" in each for each in messages)
    for line in (text, *messages):
        assert "'backward." not in line
        assert "gradients." not in line
