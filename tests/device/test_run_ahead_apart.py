# SPDX-License-Identifier: Apache-2.0
"""Planned passes on ranks that differ: late ranks, gradients of some ranks, join()."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_training import (
    AHEAD,
    DEADLINE_S,
    PLANNED,
    SIZE,
    Quiet,
    Training,
    in_a_plan,
    is_planned,
    run_ahead_on_double,
    wait_for,
)
from pool import error_of, eventually

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import backward_sync_of
from torch_ring.optimizer.planned_pass import Entered


def run_into_the_bound(folder: Path, device: str) -> None:
    """The others wait for the last rank after `AHEAD` passes, and not before."""
    training = in_a_plan(Quiet(device))
    late = hvd.size() - 1
    mine = folder / str(hvd.rank())
    if hvd.rank() == late:
        for rank in range(late):
            wait_for(folder / f"{rank}.{AHEAD}")
        assert not eventually(lambda: any(folder.glob(f"*.{AHEAD + 1}")), 0.5)
    for number in range(1, AHEAD + 3):
        training.step()
        mine.with_suffix(f".{number}").touch()
    training.check()


def test_a_host_runs_so_far_ahead_and_no_further(tmp_path):
    run_ahead_on_double(functools.partial(run_into_the_bound, tmp_path), SIZE)


def use_a_branch_alone(device: str) -> tuple[int, str, str, str]:
    """Rank 0 alone uses a branch in one pass, while the others run ahead."""
    training = in_a_plan(Training(device))
    first = training.done

    def go_on() -> None:
        for step in range(AHEAD + 4):
            training.step(0, *[1] * (step == 0 and hvd.rank() == 0))

    kind, text = error_of(go_on)
    done = training.done - first
    return done, kind, text, error_of(training.optimizer.step)[0]


def test_a_gradient_that_only_some_ranks_have_is_refused():
    results = run_ahead_on_double(use_a_branch_alone, SIZE)
    for rank, (done, kind, text, later) in enumerate(results):
        assert kind in ("RingError", "PeerLostError"), text
        assert (
            "rank 0 has a gradient of 'branches.1.weight' and 1 other parameter, which the passes "
            "before did not have, and which rank 1 does not have"
        ) in text
        assert "run_ahead=False" in text
        assert done <= (AHEAD + 1 if rank else 0)
        assert later in ("RingError", "PeerLostError"), "it has stepped after the error"


def hear_of_it_late(folder: Path, device: str) -> tuple[str, str]:
    """Rank 1 has stepped once more, and leaves while the others end the pass after that."""
    training = in_a_plan(Quiet(device))
    run_ahead = backward_sync_of(hvd.global_process_set).run_ahead
    send = run_ahead._send

    def send_when_it_has_left(*report: Any) -> Entered:
        (folder / str(hvd.rank())).touch()
        wait_for(folder / "left")
        entered = send(*report)
        assert eventually(entered.work.done, DEADLINE_S)
        return entered

    if hvd.rank() != 1:
        training.step()
        run_ahead._send = send_when_it_has_left
        return error_of(training.step)
    with training.optimizer.skip_synchronize():
        training.optimizer.step()
    for rank in {*range(hvd.size())} - {1}:
        wait_for(folder / str(rank))
    failure = error_of(training.step)  # "nothing" if the others' reports have not come
    hvd.shutdown()
    (folder / "left").touch()
    return failure


def test_a_rank_that_leaves_has_told_the_others_why(tmp_path):
    failures = run_ahead_on_double(functools.partial(hear_of_it_late, tmp_path), SIZE)
    for rank, (kind, text) in enumerate(failures):
        if rank != 1 or kind != "nothing":
            assert kind == "MismatchError", text
            assert "rank 0 has taken 4 optimizer steps, rank 1 5" in text


def join_with_a_pending_collective(device: str) -> None:
    """Rank 0 has called 'm' when it joins; the others call it after passes that they run ahead."""
    training = in_a_plan(Quiet(device))
    mine = torch.full((3,), hvd.rank() + 1.0, device=device)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(mine, name="m", op=hvd.Sum)
    else:
        hvd.allreduce(torch.zeros(1), name="rank 0 joins")  # ends when it has, and not before
        training.steps(1)
        handle = hvd.allreduce_async(mine, name="m", op=hvd.Sum)
        training.steps(3)
    hvd.join()
    assert hvd.synchronize(handle).tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 3
    others = range(1, hvd.size())
    expected = sum(training.done - 1 + rank for rank in others) / hvd.size()
    if hvd.rank() != 0:
        assert training.weights[0].tolist() == [pytest.approx(expected)] * 5


def test_join_with_a_pending_collective():
    run_ahead_on_double(join_with_a_pending_collective, SIZE)


def call_during_a_pass(folder: Path, device: str) -> tuple[str, str]:
    """Rank 0 has joined; the others call a collective between two launches of a planned pass."""
    training = in_a_plan(Quiet(device))
    call = functools.partial(hvd.allreduce_async, torch.ones(3, device=device), name="m")
    called: list[hvd.Handle] = []

    def go_on() -> None:
        if hvd.rank() > 0:
            wait_for(folder / "joins")
            weight = training.weights[1]
            hook = weight.register_post_accumulate_grad_hook(lambda _: called.append(call()))
            training.step()
            hook.remove()
            training.steps(3)
        else:
            (folder / "joins").touch()
        hvd.join()

    return error_of(go_on)


def test_a_collective_during_a_pass_after_a_join_is_refused(tmp_path):
    program = functools.partial(call_during_a_pass, tmp_path)
    failures = run_ahead_on_double(program, SIZE, TORCH_RING_BUCKET_BYTES="1")
    for rank, (kind, text) in enumerate(failures):
        assert kind == ("RingError" if rank == 0 else "PeerLostError"), text
        assert "allreduce 'm' float32 [3]" in text
        assert "during a backward pass whose hosts run ahead" in text


def use_process_sets(device: str) -> None:
    """While there is another set, the ranks agree; then they plan again."""
    training = in_a_plan(Training(device))
    added = hvd.add_process_set([0, 1])
    training.steps(PLANNED + 2)
    assert not is_planned()
    hvd.remove_process_set(added)
    training.steps(PLANNED + 1)
    assert is_planned()


def test_a_process_set_ends_a_plan():
    run_ahead_on_double(use_process_sets, 3)
