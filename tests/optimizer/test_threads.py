# SPDX-License-Identifier: Apache-2.0
"""Backward passes in several threads: one after the other they work, together they are refused."""

import contextlib
import threading
from collections.abc import Callable

import pytest
from pool import run
from torch import Tensor
from torch.optim import SGD
from training import grads, weights

import torch_ring as hvd


def in_threads(*functions: Callable[[], None]) -> list[str]:
    """Run functions, each in a thread of its own; return the errors."""
    errors: list[str] = []

    def call(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=call, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def train_two_at_once(shared: bool) -> None:
    """The passes of two threads overlap; both end with an error on every rank."""
    pairs = [weights(1, 1), weights(1, 1)]
    optimizers = [hvd.DistributedOptimizer(SGD(pair, lr=1.0)) for pair in pairs[: 2 - shared]]
    midst = threading.Barrier(2, timeout=20)

    def meet(_: Tensor) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            midst.wait()

    def train(index: int) -> None:
        mine = 0 if shared else index
        first, last = pairs[mine]
        between = last * 1.0
        between.register_hook(meet)  # after the gradient of `first`, before the one of `last`
        try:
            ((hvd.rank() + 1) * first * between).backward()
            optimizers[mine].step()
        finally:
            midst.abort()  # a thread refused at its first gradient never gets there

    errors = in_threads(lambda: train(0), lambda: train(1))
    assert len(errors) == 2, errors
    for error in errors:
        assert "two threads" in error, errors
        assert "Error: rank" in error or "failed: " in error
    assert [p.item() for pair in pairs for p in pair] == [1] * 4, "no step was taken"


def pass_within_another() -> None:
    """A thread's whole pass lies in the midst of another one's, of the same optimizer."""
    first, last, other = weights(1, 1, 1)
    optimizer = hvd.DistributedOptimizer(SGD([first, last, other], lr=1.0))  # noqa: F841 - it lives
    is_in_midst, is_over = threading.Event(), threading.Event()

    def wait(_: Tensor) -> None:
        is_in_midst.set()
        assert is_over.wait(20)

    between = last * 1.0
    between.register_hook(wait)

    def train_inside() -> None:
        assert is_in_midst.wait(20)
        try:
            (other * 2).backward()
        finally:
            is_over.set()

    errors = in_threads(train_inside, lambda: (first * between).backward())
    assert len(errors) == 2, errors  # else its gradient has joined the other thread's pass
    assert "two threads" in errors[0], errors


def train_in_turns() -> None:
    first, second = weights(1, 1)
    one = hvd.DistributedOptimizer(SGD([first], lr=0.0))
    other = hvd.DistributedOptimizer(SGD([second], lr=0.0))

    def train(parameter, optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            ((hvd.rank() + 1) * parameter).backward()
            assert grads([parameter]) == [1.5]
            optimizer.step()

    for parameter, optimizer in [(first, one), (second, other)] * 2:
        assert in_threads(lambda p=parameter, o=optimizer: train(p, o)) == []


@pytest.mark.parametrize(
    ("check", "args", "kind"),
    [
        (train_two_at_once, (False,), "ended"),
        (train_two_at_once, (True,), "ended"),
        (pass_within_another, (), "ended"),
        (train_in_turns, (), None),
    ],
)
def test_passes_in_several_threads(check, args, kind):
    run(check, 2, args=args, kind=kind)
