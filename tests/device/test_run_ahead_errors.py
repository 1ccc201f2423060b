# SPDX-License-Identifier: Apache-2.0
"""Planned passes that end badly: a dead rank, Ctrl-C, an exception in the middle, shutdown()."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
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


def die(folder: Path, device: str) -> tuple[str, str] | None:
    training = in_a_plan(Training(device))
    all_have_passed(folder, hvd.size())
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: training.steps(AHEAD + 4))


def test_a_dead_rank(tmp_path):
    results = run_ahead_on_double(functools.partial(die, tmp_path), SIZE, may_die=[1])
    for rank in {*range(SIZE)} - {1}:
        kind, text = results[rank]
        assert kind == "PeerLostError"
        assert "rank 1" in text


@contextlib.contextmanager
def pressing_ctrl_c(when: Callable[[], bool], pressed: Path) -> Iterator[None]:
    """Send SIGINT to this process once `when()` holds, from another thread."""

    def press() -> None:
        if eventually(when, DEADLINE_S):
            os.kill(os.getpid(), signal.SIGINT)
            pressed.touch()

    thread = threading.Thread(target=press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        yield
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_a_rank_without_data(folder: Path, device: str) -> None:
    """Ctrl-C arrives while rank 1 waits for rank 0's report; the pass ends, and rank 1 goes on."""
    training = in_a_plan(Training(device))
    pressed = folder / "pressed"
    agreement = backward_sync_of(hvd.global_process_set).agreement
    if hvd.rank() == 0:
        wait_for(pressed)
        training.step()
    elif hvd.rank() == 1:
        training.optimizer.zero_grad()
        with (
            pressing_ctrl_c(lambda: agreement.is_reducing, pressed),
            pytest.raises(KeyboardInterrupt),
        ):
            training.optimizer.step()
        training.optimizer.step()
        training.done += 1
    else:
        training.step()
    training.steps(AHEAD + 3)
    assert_same_on_all_ranks(*weights_of(training.model))


def test_an_interrupt_of_a_rank_without_data(tmp_path):
    run_ahead_on_double(functools.partial(interrupt_a_rank_without_data, tmp_path), SIZE)


def fail_in_backward(before: int, where: str, folder: Path, device: str) -> tuple[str, str]:
    """A hook of the program raises once on rank 1; it goes on with step()."""
    training = Training(device)
    training.steps(before)
    # Hosts run ahead: another rank could meet the failure in the steps before it.
    all_have_passed(folder, hvd.size())
    if hvd.rank() == 1:
        with refusing(training.model.get_parameter(where)), pytest.raises(ValueError, match="bad"):
            training.backward()
        training.optimizer.zero_grad()

    def go_on() -> None:
        if hvd.rank() == 1:
            training.optimizer.step()
            training.done += 1
        training.steps(AHEAD + 5)

    return error_of(go_on)


@contextlib.contextmanager
def refusing(parameter: torch.Tensor) -> Iterator[None]:
    def refuse(_: torch.Tensor) -> None:
        raise ValueError("bad batch")

    hook = parameter.register_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("before", [1, PLANNED + 2], ids=["agreed", "planned"])
@pytest.mark.parametrize("where", ["branches.0.weight", "trunk.weight"], ids=["unsent", "sent"])
def test_an_exception_that_one_rank_catches(where, before, tmp_path):
    program = functools.partial(fail_in_backward, before, where, tmp_path)
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


def agree_on_failures(device: str) -> None:
    """All ranks leave out a batch with which one of them fails; the plan is made anew."""
    training = Training(device)
    for batch in range(2 * PLANNED + 6):
        fails = batch == PLANNED + 2 and hvd.rank() == 1
        with contextlib.ExitStack() as stack:
            if batch == PLANNED + 2:
                stack.enter_context(training.optimizer.no_sync())
            if fails:
                stack.enter_context(pytest.raises(ValueError, match="bad batch"))
                stack.enter_context(refusing(training.model.trunk.weight))
            training.backward()
        if hvd.any_rank(fails):
            training.optimizer.zero_grad()
        else:
            training.optimizer.step()
    assert is_planned()
    assert_same_on_all_ranks(*weights_of(training.model))


def test_ranks_that_agree_on_a_failure():
    run_ahead_on_double(agree_on_failures, 2)


class Reentrant:
    """Steps with a weight that is used in a segment of a reentrant checkpoint and after it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.weight = torch.nn.Parameter(torch.ones(3, device=device))
        self.optimizer = hvd.DistributedOptimizer(SGD([self.weight], lr=0.0))

    def step(self, in_segment: bool) -> None:
        self.optimizer.zero_grad()
        factor = 1 + hvd.rank()
        inner = torch.ones(3, device=self.device, requires_grad=True)
        if in_segment:
            loss = checkpoint(
                lambda value: (factor * value * self.weight).sum(),
                inner,
                use_reentrant=True,
                preserve_rng_state=False,
            )
        else:
            loss = (factor * inner * self.weight).sum()
        (loss + (2 * self.weight).sum()).backward()
        self.optimizer.step()


def come_again(device: str) -> None:
    """A gradient arrives again after it has been sent; from then on it is sent at the end."""
    training = Reentrant(device)
    for _ in range(12):
        training.step(True)
        expected = 2 + (1 + hvd.size()) / 2
        assert training.weight.grad.tolist() == [pytest.approx(expected)] * 3
    assert is_planned()


def test_a_gradient_that_comes_again():
    run_ahead_on_double(come_again, SIZE)


def come_again_unforeseen(folder: Path, device: str) -> tuple[str, str]:
    """Rank 1 begins to use the segment in a planned pass."""
    training = Reentrant(device)
    for _ in range(PLANNED + 2):
        training.step(False)
    assert is_planned()
    all_have_passed(folder, hvd.size())

    def go_on() -> None:
        for _ in range(AHEAD + 2):
            training.step(hvd.rank() == 1)

    return error_of(go_on)


def test_a_gradient_that_comes_again_in_a_planned_pass_is_refused(tmp_path):
    for kind, text in run_ahead_on_double(functools.partial(come_again_unforeseen, tmp_path), SIZE):
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
