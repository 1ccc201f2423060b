# SPDX-License-Identifier: Apache-2.0
"""The program catches Ctrl-C in backward(): the next pass works, or its error has advice."""

from __future__ import annotations

import contextlib
import gc
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
from pool import error_of, eventually, run
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from training import grads, take_step, weights
from zoo import Segments

import torch_ring as hvd
from torch_ring._C import PassEnd
from torch_ring.optimizer import backward_sync
from torch_ring.optimizer.backward_sync import backward_sync_of
from torch_ring.optimizer.bucket_layout import BucketLayout

DEADLINE_S = 20.0


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handle SIGINT as an interactive program does, and not as a rank of a test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
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


def wait_for(path: Path) -> None:
    assert eventually(path.exists, DEADLINE_S)


def is_waiting() -> bool:
    return backward_sync_of(hvd.global_process_set).agreement.is_open


def interrupt_rank_1(folder: Path, backward: Callable[[], object]) -> None:
    """Rank 1 is interrupted in a pass while it waits for rank 0, whose pass begins afterwards."""
    interrupted = folder / "interrupted"
    if hvd.rank() == 0:
        wait_for(interrupted)
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
    (2 * x if hvd.rank() == 0 else 4 * x + 8 * y).backward()
    assert grads([x]) == [3]
    optimizer.step()
    assert grads([x, y]) == [3, 4]
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


def interrupt_at_random(count: int) -> int:
    """Interrupts at any time: a pass has either ended, or can be repeated."""
    sync = backward_sync_of(hvd.global_process_set)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    parts = [model] if count == 1 else [*model]
    optimizers = [hvd.DistributedOptimizer(SGD(part.parameters(), lr=0.0)) for part in parts]
    armed, begun, done = threading.Event(), threading.Event(), threading.Event()
    pressed = threading.Event()
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

    before = signal.signal(signal.SIGINT, raise_if_armed)
    pressing = threading.Thread(target=press_once_a_pass)
    pressing.start()
    try:
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
    finally:
        armed.clear()
        done.set()
        pressing.join()
        signal.signal(signal.SIGINT, before)
    return interrupts


class InterruptedEnd(PassEnd):
    """An end of a pass in C++, after which Ctrl-C comes before Python takes note of it."""

    def run_plain(self, *args: Any) -> bool:
        has_run = super().run_plain(*args)
        backward_sync.PassEnd = PassEnd  # type: ignore[misc]
        if has_run:
            raise KeyboardInterrupt
        return has_run


def interrupt_after_the_reduction(then: str) -> None:
    """Rank 1 is interrupted when a pass is reduced, and then the ranks do something rare."""
    parameters = [weight for _ in range(2) for weight in weights(1)]
    first, second = (hvd.DistributedOptimizer(SGD([each], lr=0.0)) for each in parameters)
    for _ in range(3):
        sum(parameters).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    if hvd.rank() == 1:
        backward_sync.PassEnd = InterruptedEnd  # type: ignore[misc]
        with pytest.raises(KeyboardInterrupt):
            (sum(parameters) * 2).backward()
    else:
        (sum(parameters) * 4).backward()
    assert grads(parameters) == [3, 3]
    if then == "drop one":
        del second, optimizer
        gc.collect()
    elif then == "add parameters":
        second.add_param_group({"params": weights(1)})
        second.step()
    elif then == "compute a loss alone":
        first.step(lambda: parameters[0].sum())
        first.zero_grad()

        def closure() -> Tensor:
            if hvd.rank() == 0:
                (parameters[0] * 8).backward()
            return parameters[0].sum()

        first.step(closure)
        assert grads(parameters) == [4, 3]
    first.step()
    take_step(first, parameters[0] * (1 + hvd.rank()))
    assert grads(parameters[:1]) == [1.5]


def interrupt_the_preparation() -> None:
    """Rank 1 is interrupted as it makes room for zeros, and repeats the pass."""
    a, b = parameters = weights(1, 1)
    interrupts = 0
    new_memory = BucketLayout.new_memory

    def interrupted(layout: BucketLayout, bucket: int) -> Tensor:
        nonlocal interrupts
        interrupts += 1
        if interrupts == 1 and hvd.rank() == 1:
            raise KeyboardInterrupt
        return new_memory(layout, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketLayout, "new_memory", interrupted)
        optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
        for _ in range(3):
            take_step(optimizer, a + b)
        kept = b.grad
        interrupts = 0
        a.grad = b.grad = None
        if hvd.rank() == 0:
            (a * 2 + b * 4).backward()
        else:
            with pytest.raises(KeyboardInterrupt):
                (a * 6).backward()
            a.grad = b.grad = None
            (a * 6).backward()
    assert interrupts > 0
    assert grads(parameters) == [4, 2]
    assert kept is not None
    assert kept.item() == 1
    optimizer.step()
    (a + b).backward()
    assert grads(parameters) == [5, 3]


def zero_others_meanwhile(folder: Path) -> None:
    """While rank 0 waits in a pass, another thread drops the gradients of an idle optimizer."""
    parameters = [weight for _ in range(3) for weight in weights(1)]
    *used, idle = [hvd.DistributedOptimizer(SGD([each], lr=0.0)) for each in parameters]
    for _ in range(3):
        sum(parameters).backward()
        for optimizer in (*used, idle):
            optimizer.step()
            optimizer.zero_grad()
    dropped = folder / "dropped"

    def drop() -> None:
        assert eventually(is_waiting, DEADLINE_S)
        idle.zero_grad()
        dropped.touch()

    thread = threading.Thread(target=drop)
    if hvd.rank() == 0:
        thread.start()
    else:
        wait_for(dropped)
    sum(parameters[:2]).backward()
    if hvd.rank() == 0:
        thread.join()
    else:
        idle.zero_grad()
    for _ in range(3):
        for optimizer in used:
            optimizer.step()
        sum(parameters[:2]).backward()
    assert grads(parameters[:2]) == [4, 4]


def interrupt_before_a_gradient_comes_again(folder: Path, here: bool) -> None:
    """The report already sent does not announce that a gradient of the next pass comes again.

    Rank 0's does if its pass has such a gradient, too; otherwise the ranks' steps differ.
    """
    model, alone = Segments(again=True), Segments(again=True)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    rows = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)

    def backward_of_all() -> None:
        """All gradients come in a nested pass: nothing is sent before its end."""
        checkpoint(model, rows, False, use_reentrant=True).sum().backward()

    interrupt_rank_1(folder, backward_of_all)
    optimizer.zero_grad()

    def go_on() -> None:
        model(rows, segments=here or hvd.rank() == 1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        backward_of_all()

    if here:
        go_on()
        alone(rows, segments=False).sum().backward()
        SGD(alone.parameters(), lr=0.1).step()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, other)
    else:
        with pytest.raises(hvd.MismatchError, match=r"in different steps|optimizer steps"):
            go_on()


@pytest.mark.parametrize(
    ("interrupt", "args"),
    [
        (interrupt_a_sent_bucket, ()),
        (interrupt_before_a_gradient_comes_again, (False,)),
        (interrupt_before_a_gradient_comes_again, (True,)),
    ],
)
def test_an_interrupt_after_gradients_were_sent(tmp_path, interrupt, args):
    env = {"TORCH_RING_BUCKET_BYTES": "256"}
    run(interrupt, 2, args=(tmp_path, *args), transport="tcp", env=env)


@pytest.mark.parametrize("interrupt", [interrupt_with_another_graph, zero_others_meanwhile])
def test_a_pass_in_which_another_rank_waits(tmp_path, interrupt):
    run(interrupt, 2, args=(tmp_path,))


@pytest.mark.parametrize(
    ("interrupt", "args"),
    [
        *(
            (interrupt_after_the_reduction, (then,))
            for then in ("step", "drop one", "add parameters", "compute a loss alone")
        ),
        (interrupt_the_preparation, ()),
    ],
)
def test_an_interrupt_beside_the_reduction(interrupt, args):
    run(interrupt, 2, args=args)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_interrupts_at_any_time(optimizers):
    assert sum(run(interrupt_at_random, 2, args=(optimizers,))) > 0
