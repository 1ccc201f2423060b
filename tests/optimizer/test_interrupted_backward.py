# SPDX-License-Identifier: Apache-2.0
"""The program catches Ctrl-C in backward(): the next pass works, or its error has advice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, eventually, run
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from training import grads, take_step, weights
from zoo import Segments

import torch_ring as hvd
from torch_ring._C import PassEnd
from torch_ring.optimizer import backward_sync
from torch_ring.optimizer.backward_sync import backward_sync_of

DEADLINE_S = 20.0


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def interruptible(handler: Any = signal.default_int_handler) -> Iterator[None]:
    """Handle SIGINT as an interactive program does, and not as a rank of a test."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def pressing_ctrl_c(when: Callable[[], bool]) -> Iterator[None]:
    """Send SIGINT to this process once `when()` holds, from another thread."""

    def press() -> None:
        if eventually(when, DEADLINE_S):
            press_ctrl_c()

    thread = threading.Thread(target=press)
    with interruptible():
        thread.start()
        yield
        thread.join()


def is_waiting() -> bool:
    return backward_sync_of(hvd.global_process_set).agreement.is_open


def interrupt_rank_1(folder: Path, backward: Callable[[], object]) -> None:
    """Rank 1 is interrupted in a pass while it waits for rank 0, whose pass begins afterwards."""
    interrupted = folder / "interrupted"
    if hvd.rank() == 0:
        assert eventually(interrupted.exists, DEADLINE_S)
    else:
        with pressing_ctrl_c(is_waiting), pytest.raises(KeyboardInterrupt):
            backward()
        interrupted.touch()


def interrupt_the_wait(folder: Path, steps_before: int, then: str) -> None:
    """Rank 1 is interrupted while it waits for rank 0, and goes on."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    for _ in range(steps_before):
        x.backward()
        optimizer.step()
        optimizer.zero_grad()
    interrupt_rank_1(folder, (6 * x).backward)
    if hvd.rank() == 0:
        (2 * x).backward()
    elif then != "step":
        if then == "next pass":
            optimizer.zero_grad()
        (4 * x).backward()
    optimizer.step()
    assert grads([x]) == [{"next pass": 3, "one more pass": 6, "step": 4}[then]]
    for _ in range(2):
        optimizer.zero_grad()
        ((hvd.rank() + 1) * x).backward()
        assert grads([x]) == [1.5]
        optimizer.step()


def interrupt_an_addition(folder: Path, steps_before: int, then: str) -> None:
    """The interrupted pass adds to an averaged gradient, which the program may drop then."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    for _ in range(steps_before):
        take_step(optimizer, x)
    (9 * x).backward()
    before = x.grad.item()
    interrupt_rank_1(folder, (6 * x).backward)
    if hvd.rank() == 1 and then == "dropped":
        optimizer.zero_grad()

    def go_on() -> None:
        ((2 + 2 * hvd.rank()) * x).backward()
        optimizer.step()
        hvd.barrier()

    _, text = error_of(go_on)
    if then == "dropped":
        assert "the program has dropped those: call zero_grad() before" in text, text
    else:
        assert not text
        assert grads([x]) == [before + (2 + 10) / 2]


@pytest.mark.parametrize(
    ("interrupt", "then"),
    [
        *((interrupt_the_wait, then) for then in ("next pass", "one more pass", "step")),
        *((interrupt_an_addition, then) for then in ("kept", "dropped")),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 2])  # ends in Python, and in C++
def test_an_interrupted_wait(tmp_path, steps_before, interrupt, then):
    run(interrupt, 2, args=(tmp_path, steps_before, then))


def interrupt_with_another_graph(folder: Path) -> None:
    """The next pass has gradients missing from the report already sent: the step reports them."""
    x, y = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=0.0))
    interrupt_rank_1(folder, (6 * x).backward)
    optimizer.zero_grad()
    (2 * x + 4 * y if hvd.rank() == 0 else 4 * x + 8 * y).backward()
    assert grads([x]) == [3]
    optimizer.step()
    assert grads([x, y]) == [3, 6]
    optimizer.zero_grad()
    (x + y).backward()
    assert grads([x, y]) == [1, 1]


def interrupt_a_sent_bucket(folder: Path) -> None:
    """Between hosts a pass has sent gradients when it is interrupted: all ranks get an error."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    interrupt_rank_1(folder, x.backward)

    def go_on() -> None:
        for _ in range(2):  # rank 1 had sent all data for rank 0's first pass
            optimizer.zero_grad()
            x.backward()

    message = error_of(go_on)[1]
    assert "rank 1" in message
    assert "interrupted after part of its gradients had been sent" in message
    assert "shutdown() and init()" in message


class InterruptedEnd(PassEnd):
    """An end of a pass in C++, after which Ctrl-C comes before Python takes note of it."""

    def run_plain(self, *args: Any) -> bool:
        has_run = super().run_plain(*args)
        backward_sync.PassEnd = PassEnd  # type: ignore[misc]
        if has_run:
            raise KeyboardInterrupt
        return has_run


@pytest.mark.parametrize("leaves_out", [False, True])
@on_ranks(2)
def test_an_interrupt_after_the_reduction(leaves_out: bool) -> None:
    """Rank 1 is interrupted when a pass is reduced; then it steps, or leaves that out."""
    parameters = weights(1, 1)
    optimizers = [hvd.DistributedOptimizer(SGD([each], lr=0.0)) for each in parameters]
    for _ in range(3):
        sum(parameters).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if hvd.rank() == 1:
        backward_sync.PassEnd = InterruptedEnd  # type: ignore[misc]
        with pytest.raises(KeyboardInterrupt):
            (sum(parameters) * 2).backward()
    else:
        (sum(parameters) * 4).backward()
    assert grads(parameters) == [3, 3]

    def go_on() -> None:
        if hvd.rank() == 0 or not leaves_out:
            optimizers[0].step()
        take_step(optimizers[0], parameters[0] * (1 + hvd.rank()))

    kind, text = error_of(go_on)
    if leaves_out:
        assert kind == "MismatchError", text
        assert "the ranks are in different steps" in text
    else:
        assert not text
        assert grads(parameters[:1]) == [1.5]


def interrupt_before_a_gradient_comes_again(folder: Path) -> None:
    """The report already sent does not announce that a gradient of the next pass comes again."""
    model = Segments(again=True)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    rows = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)

    def backward_of_all() -> None:
        """All gradients come in a nested pass: nothing is sent before its end."""
        checkpoint(model, rows, False, use_reentrant=True).sum().backward()

    interrupt_rank_1(folder, backward_of_all)
    optimizer.zero_grad()

    def go_on() -> None:
        model(rows, segments=hvd.rank() == 1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        backward_of_all()

    assert error_of(go_on)[0] == "MismatchError"


@pytest.mark.parametrize(
    ("interrupt", "transport"),
    [
        (interrupt_with_another_graph, "shm"),
        (interrupt_a_sent_bucket, "tcp"),
        (interrupt_before_a_gradient_comes_again, "tcp"),
    ],
)
def test_a_pass_of_which_the_others_know_something(tmp_path, interrupt, transport):
    env = {"TORCH_RING_BUCKET_BYTES": "256"}
    run(interrupt, 2, args=(tmp_path,), transport=transport, env=env)


def interrupt_at_random(count: int) -> int:
    """Interrupts at any time: a pass has either ended, or can be repeated."""
    sync = backward_sync_of(hvd.global_process_set)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    parts = [model] if count == 1 else [*model]
    optimizers = [hvd.DistributedOptimizer(SGD(part.parameters(), lr=0.0)) for part in parts]
    armed, begun, done, pressed = (threading.Event() for _ in range(4))
    moments = random.Random(hvd.rank())
    interrupts = 0

    def raise_if_armed(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            raise KeyboardInterrupt

    def press_once_a_pass() -> None:
        while not done.is_set():
            if begun.wait(0.01):
                begun.clear()
                time.sleep(moments.random() * 2e-3)
                press_ctrl_c()
                pressed.set()

    pressing = threading.Thread(target=press_once_a_pass)
    with interruptible(raise_if_armed):
        pressing.start()
        for step in range(100):
            number = sync.number
            while sync.number == number:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = (step + hvd.rank()) * model(torch.ones(1, 40)).sum()
                try:
                    try:
                        armed.set()
                        begun.set()
                        loss.backward()
                    finally:
                        armed.clear()  # the signal may come here, too
                except KeyboardInterrupt:
                    interrupts += 1
                assert pressed.wait(DEADLINE_S)  # only once a pass: a second one is not deferred
                pressed.clear()
            mean = step + (hvd.size() - 1) / 2
            bias = model[1].bias.grad
            assert bias is not None
            assert torch.equal(bias, torch.full((40,), mean))
            for optimizer in optimizers:
                optimizer.step()
        done.set()
        pressing.join()
    return interrupts


@pytest.mark.parametrize("optimizers", [1, 2])
def test_interrupts_at_any_time(optimizers):
    assert sum(run(interrupt_at_random, 2, args=(optimizers,))) > 0
