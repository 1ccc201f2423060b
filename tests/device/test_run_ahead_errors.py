# SPDX-License-Identifier: Apache-2.0
"""Planned passes that end badly: a dead rank, Ctrl-C, an exception in the middle, shutdown()."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from ahead_training import (
    AHEAD,
    DEADLINE_S,
    PLANNED,
    SIZE,
    Branches,
    Quiet,
    Training,
    in_a_plan,
    is_planned,
    run_ahead_on_double,
    wait_for,
    weights_of,
    wrapped,
)
from pool import all_have_passed, error_of, eventually
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from training import assert_same_on_all_ranks

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import backward_sync_of


def go_on_without(how: str, folder: Path, device: str) -> tuple[str, str]:
    """Rank 1 is killed, or leaves."""
    training = in_a_plan(Training(device))
    all_have_passed(folder, hvd.size())
    if hvd.rank() == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == 1:
        hvd.shutdown()
        return "", ""
    return error_of(lambda: training.steps(AHEAD + 4))


@pytest.mark.parametrize("how", ["killed", "leaves"])
def test_a_rank_that_is_gone(how, tmp_path):
    program = functools.partial(go_on_without, how, tmp_path)
    results = run_ahead_on_double(program, SIZE, may_die=[1] if how == "killed" else [])
    for rank in {*range(SIZE)} - {1}:
        kind, text = results[rank]
        assert kind == "PeerLostError"
        assert "rank 1" in text


def interrupt_a_rank_without_data(folder: Path, device: str) -> None:
    """Ctrl-C arrives while rank 1 waits for rank 0's report; the pass ends, and rank 1 goes on."""
    training = in_a_plan(Training(device))
    pressed = folder / "pressed"
    agreement = backward_sync_of(hvd.global_process_set).agreement

    def press() -> None:
        if eventually(lambda: agreement.is_reducing, DEADLINE_S):
            os.kill(os.getpid(), signal.SIGINT)
            pressed.touch()

    if hvd.rank() == 1:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        training.optimizer.zero_grad()
        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step()
        thread.join()
        signal.signal(signal.SIGINT, before)
        training.optimizer.step()
        training.done += 1
    else:
        if hvd.rank() == 0:
            wait_for(pressed)
        training.step()
    training.steps(AHEAD + 3)
    assert_same_on_all_ranks(*weights_of(training.model))


def test_an_interrupt_of_a_rank_without_data(tmp_path):
    run_ahead_on_double(functools.partial(interrupt_a_rank_without_data, tmp_path), SIZE)


def fail_in_backward(where: str, folder: Path, device: str) -> tuple[str, str]:
    """A hook of the program raises once on rank 1; it goes on with step()."""
    training = in_a_plan(Training(device))
    # Hosts run ahead: another rank could meet the failure in the steps before it.
    all_have_passed(folder, hvd.size())
    if hvd.rank() == 1:

        def refuse(_: torch.Tensor) -> None:
            raise ValueError("bad batch")

        hook = training.model.get_parameter(where).register_hook(refuse)
        with pytest.raises(ValueError, match="bad"):
            training.backward()
        hook.remove()
        training.optimizer.zero_grad()

    def go_on() -> None:
        if hvd.rank() == 1:
            training.optimizer.step()
            training.done += 1
        training.steps(AHEAD + 5)

    return error_of(go_on)


@pytest.mark.parametrize("where", ["branches.0.weight", "trunk.weight"], ids=["unsent", "sent"])
def test_an_exception_that_one_rank_catches(where, tmp_path):
    program = functools.partial(fail_in_backward, where, tmp_path)
    failures = run_ahead_on_double(program, SIZE, TORCH_RING_BUCKET_BYTES="1")
    for rank, (kind, text) in enumerate(failures):
        assert kind == ("RingError" if rank == 1 else "PeerLostError")
        assert "has failed (ValueError: bad batch)" in text
        assert f"rank 1{'' if rank == 1 else ' ('}" in text


def step_while_a_thread_is_in_the_failed_pass(device: str) -> tuple[str, str]:
    """On rank 1 the device's thread of autograd is still in a pass whose host part has failed."""
    held, gone, here = (
        torch.nn.Parameter(torch.ones(3, device=d)) for d in (device, device, "cpu")
    )
    optimizer = hvd.DistributedOptimizer(SGD([held, gone, here], lr=1.0))
    is_held, has_stepped = threading.Event(), threading.Event()

    def hold(_: torch.Tensor) -> None:
        is_held.set()
        assert has_stepped.wait(DEADLINE_S)

    def refuse(_: torch.Tensor) -> None:
        assert is_held.wait(DEADLINE_S)
        raise ValueError("bad batch")

    middle, first = held * 1.0, here * 1.0
    if hvd.rank() == 1:
        middle.register_hook(hold)
        first.register_hook(refuse)
    # The last operation made is the first one of backward: `gone` has its gradient before the hook.
    loss = middle.sum().cpu() + first.sum() + (gone * 2.0).sum().cpu()

    def go_on() -> None:
        if hvd.rank() == 1:
            with pytest.raises(ValueError, match="bad"):
                loss.backward()
        else:
            loss.backward()
        optimizer.step()

    try:
        return error_of(go_on)
    finally:
        has_stepped.set()


def test_a_step_after_a_failed_pass_in_which_a_thread_still_is():
    failures = run_ahead_on_double(step_while_a_thread_is_in_the_failed_pass, 2)
    for rank, (kind, text) in enumerate(failures):
        assert kind == ("RingError" if rank == 1 else "PeerLostError"), text
        assert "has failed (ValueError: bad batch)" in text


def come_again(foreseen: bool, folder: Path, device: str) -> tuple[str, str]:
    """A weight is used in a reentrant segment and after it, so its gradient comes twice.

    If that is foreseen, it is sent at the end; else rank 1 begins to in a planned pass.
    """
    weight = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=0.0))

    def product(value: torch.Tensor) -> torch.Tensor:
        return ((1 + hvd.rank()) * value * weight).sum()

    def take_steps(count: int, in_segment: bool) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            inner = torch.ones(3, device=device, requires_grad=True)
            options = {"use_reentrant": True, "preserve_rng_state": False}
            loss = checkpoint(product, inner, **options) if in_segment else product(inner)
            (loss + (2 * weight).sum()).backward()
            if foreseen:
                assert weight.grad.tolist() == [pytest.approx(2 + (1 + hvd.size()) / 2)] * 3
            optimizer.step()

    take_steps(PLANNED + 2, foreseen)
    assert is_planned()
    all_have_passed(folder, hvd.size())
    return error_of(lambda: take_steps(AHEAD + 2, foreseen or hvd.rank() == 1))


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_gradient_that_comes_again(foreseen, tmp_path):
    program = functools.partial(come_again, foreseen, tmp_path)
    for kind, text in run_ahead_on_double(program, SIZE):
        assert (kind == "nothing") == foreseen
        if not foreseen:
            assert kind in ("RingError", "PeerLostError")
            assert "got another gradient in a backward pass that had already sent" in text


def leave_late(folder: Path, device: str) -> None:
    """Rank 0 leaves while the others still have passes to enter."""
    training = in_a_plan(Quiet(device))
    if hvd.rank() == 0:
        training.steps(AHEAD)
        (folder / "finished").touch()
    else:
        wait_for(folder / "finished")
        training.steps(AHEAD)
    size = hvd.size()
    hvd.shutdown()
    expected = training.done - 1 + (size - 1) / 2
    assert training.weights[0][0].item() == pytest.approx(expected)


def test_shutdown_with_passes_under_way(tmp_path):
    run_ahead_on_double(functools.partial(leave_late, tmp_path), SIZE)


def call_in_another_order(device: str) -> tuple[str, str]:
    """A rank without data calls a collective on the device before the others' pass, in step()."""
    training = in_a_plan(Training(device))
    training.optimizer.zero_grad()
    if hvd.rank() != 1:
        training.backward()

    def go_on() -> None:
        pending = hvd.allreduce_async(torch.ones(3, device=device), name="m")
        training.optimizer.step()
        pending.wait()

    return error_of(go_on)


def test_a_collective_before_a_pass_on_one_rank():
    # PeerLostError: a rank whose peer got the error first.
    for kind, text in run_ahead_on_double(call_in_another_order, SIZE):
        assert kind in ("MismatchError", "PeerLostError")
        assert "the ranks have run ahead of it differently" in text
        assert "run_ahead=False" in text


def differ(device: str) -> tuple[str, str]:
    return error_of(lambda: wrapped(Branches(device), hvd.rank() == 0))


def test_ranks_with_other_settings():
    for kind, text in run_ahead_on_double(differ, 2):
        assert kind == "MismatchError"
        assert "run_ahead=True" in text
        assert "run_ahead=False" in text
