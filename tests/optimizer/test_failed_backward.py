# SPDX-License-Identifier: Apache-2.0
"""backward() fails on one rank, and its program catches the exception and goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, run
from torch import Tensor, nn
from torch.optim import SGD
from training import FailingBackward, grads, take_step, weights
from worlds import on_both_transports

import torch_ring as hvd

SMALL_BUCKETS = {"TORCH_RING_BUCKET_BYTES": "4"}
FAILING, STEPS = 3, 6
HINT = (
    "backward pass 4 has failed (ValueError: bad batch), and the program has caught that and gone "
    "on, while the other ranks are in that pass. A batch can be left out or repeated by all ranks "
    "together: call backward() in `with optimizer.no_sync():`, then zero_grad() if "
    "any_rank(failed), else step()"
)


def raise_bad_batch(_: Tensor) -> Tensor:
    raise ValueError("bad batch")


def loss_of(x: nn.Parameter, y: nn.Parameter, factor: float, fails: str = "") -> Tensor:
    """Return a loss in whose backward y gets its gradient before x.

    Args:
        fails: "" or the place of a failure: "first", before both; between the two in a "function"
            or a "hook".
    """
    error = ValueError("bad batch")
    first = (factor * x).sum()
    if fails == "first":
        return FailingBackward.apply(first + (factor * y).sum(), error)
    if fails == "function":
        first = FailingBackward.apply(first, error)
    elif fails == "hook":
        first = first.clone()
        first.register_hook(raise_bad_batch)
    return first + (factor * y).sum()  # autograd begins with what was computed last


class Training:
    """Steps on batches, which are numbers; rank 1 cannot compute the gradients of one."""

    def __init__(self, fails: str = "", ranks: tuple[int, ...] = (1,)) -> None:
        self.parameters = weights(0, 0)
        self.optimizer = hvd.DistributedOptimizer(SGD(self.parameters, lr=1.0))
        self.fails = fails if hvd.rank() in ranks else ""
        self.steps = 0

    def backward(self, batch: int, *, fails: bool = False) -> None:
        fails = self.fails if fails else ""
        loss_of(*self.parameters, (hvd.rank() + 1) * 100 + batch, fails).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1

    def train(self, go_on: Callable[[Training, int], None]) -> None:
        for batch in range(STEPS):
            self.optimizer.zero_grad()
            try:
                self.backward(batch, fails=batch == FAILING)
            except ValueError:
                go_on(self, batch)
            else:
                self.step()

    def check(self, *batches: int) -> None:
        mean = 100 * (hvd.size() + 1) / 2
        expected = -sum(mean + batch for batch in batches)
        assert [parameter.item() for parameter in self.parameters] == [expected] * 2


def leave_out(training: Training, _batch: int) -> None:
    """Go on with the next batch."""


def step(training: Training, _batch: int) -> None:
    training.step()


def zero_and_step(training: Training, _batch: int) -> None:
    training.optimizer.zero_grad()
    training.step()


def synchronize(training: Training, _batch: int) -> None:
    training.optimizer.synchronize()


def repeat(training: Training, batch: int) -> None:
    training.optimizer.zero_grad()
    training.backward(batch)
    training.step()


EVENTS = [leave_out, step, zero_and_step, synchronize, repeat]


def go_on_alone(go_on: Callable[[Training, int], None], fails: str) -> None:
    """All ranks are told of the failed pass, and take no step with it."""
    training = Training(fails)
    kind, text = error_of(lambda: training.train(go_on))
    assert kind == ("RingError" if hvd.rank() == 1 else "PeerLostError")
    assert HINT in text
    assert f"rank 1{'' if hvd.rank() == 1 else ' ('}" in text
    assert training.steps == FAILING


@pytest.mark.parametrize("go_on", [leave_out, repeat])
@on_both_transports
@on_ranks(2)
def test_a_pass_that_fails_on_all_ranks(transport, go_on: Callable[[Training, int], None]) -> None:
    """No rank is ahead of another."""
    training = Training("function", ranks=(0, 1, 2))
    training.train(go_on)
    batches = set(range(STEPS))
    training.check(*(batches if go_on is repeat else batches - {FAILING}))


def fail_before_any_gradient(go_on: Callable[[Training, int], None]) -> None:
    """Nothing tells this rank of the failure, and nothing of the pass has begun."""
    training = Training("first")
    training.train(go_on)
    if go_on is repeat:
        training.check(*range(STEPS))
        return
    # Rank 1's gradient of a batch counts as zero.
    expected = -sum(150 + batch for batch in range(STEPS)) + (200 + FAILING) / 2
    assert [parameter.item() for parameter in training.parameters] == [expected] * 2


def agree_on_failures(go_on: Callable[[Training, int], None]) -> None:
    """The way that docs/errors.md recommends."""
    training = Training("function")
    for batch in range(STEPS):
        training.optimizer.zero_grad()
        failed = False
        with training.optimizer.no_sync():
            try:
                training.backward(batch, fails=batch == FAILING)
            except ValueError:
                failed = True
        if hvd.any_rank(failed):
            go_on(training, batch)
        else:
            training.step()
    training.check(*(batch for batch in range(STEPS) if go_on is repeat or batch != FAILING))


def fail_without_consequence(way: str) -> None:
    """Nothing of the failed pass was to be averaged, so no rank is ahead of another."""
    x, y = weights(0, 0)
    passes = 2 if way == "first of two" else 1
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=0.0), backward_passes_per_step=passes)

    def fail() -> None:
        loss = loss_of(x, y, 1.0, "function")
        with optimizer.no_sync() if way == "no_sync" else contextlib.nullcontext():
            torch.autograd.grad(loss, [x, y]) if way == "grad" else loss.backward()

    for number in range(4):
        optimizer.zero_grad()
        if number == 2 and hvd.rank() == hvd.size() - 1:
            with pytest.raises(ValueError, match="bad batch"):
                fail()
            optimizer.zero_grad()
        for _ in range(passes):
            loss_of(x, y, hvd.rank() + number).backward()
        assert grads([x, y]) == [passes * (number + (hvd.size() - 1) / 2)] * 2
        optimizer.step()


def go_on_after_a_failure(then: str) -> None:
    """Rank 1's third pass has failed; its next one is another optimizer's, or it joins."""
    x, y, z = weights(0, 0, 0)
    one = hvd.DistributedOptimizer(SGD([x, y], lr=1.0))
    other = hvd.DistributedOptimizer(SGD([z], lr=1.0))

    def go_on() -> None:
        for number in range(4):
            fails = number == 2 and hvd.rank() == 1
            try:
                loss_of(x, y, 1.0, "function" if fails else "").backward()
            except ValueError:
                if then == "join":
                    break
                take_step(other, z)
            one.step()
            one.zero_grad()
        if then == "join":
            hvd.join()

    kind, text = error_of(go_on)
    assert kind in ("RingError", "PeerLostError")
    assert "backward pass 3 has failed (ValueError: bad batch)" in text


def go_on_after_an_error_of_all_ranks() -> None:
    """The ranks are in different steps when a bucket has been sent already."""
    training = Training()
    for batch in range(2):
        training.optimizer.zero_grad()
        training.backward(batch)
        training.step()
    if hvd.rank() == 1:
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
    for kinds in (["MismatchError"], ["RingError", "PeerLostError"]):
        training.optimizer.zero_grad()
        kind, text = error_of(lambda: training.backward(2))
        assert kind in kinds, text
    assert "which only shutdown() and init() can mend" in text


@pytest.mark.parametrize(
    ("check", "args"),
    [
        *((go_on_alone, (go_on, "function")) for go_on in EVENTS),
        (go_on_alone, (leave_out, "hook")),
        (agree_on_failures, (leave_out,)),
        (agree_on_failures, (repeat,)),
        (fail_before_any_gradient, (repeat,)),
        (fail_before_any_gradient, (step,)),
        (fail_without_consequence, ("first of two",)),
        (fail_without_consequence, ("no_sync",)),
        (fail_without_consequence, ("grad",)),
        (go_on_after_a_failure, ("another optimizer",)),
    ],
)
@pytest.mark.parametrize(("transport", "env"), [("shm", {}), ("tcp", SMALL_BUCKETS)])
def test_a_failed_pass(transport, env, check, args):
    run(check, 2, args=args, transport=transport, env=env)


@pytest.mark.parametrize(
    ("check", "args"),
    [(go_on_after_a_failure, ("join",)), (go_on_after_an_error_of_all_ranks, ())],
)
def test_a_failed_pass_that_has_sent_gradients(check, args):
    run(check, 2, args=args, transport="tcp", env=SMALL_BUCKETS)
