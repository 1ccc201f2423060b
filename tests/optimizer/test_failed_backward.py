"""backward() fails on one rank, and its program catches the exception and goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from pool import error_of, run
from torch import Tensor, nn
from torch.optim import SGD
from training import FailingBackward, grads, weights
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


def loss_of(x: nn.Parameter, y: nn.Parameter, factor: float, fails: str) -> Tensor:
    """Return a loss in whose backward y gets its gradient before x. It fails between the two."""
    first = (factor * x).sum()
    if fails == "first":
        return FailingBackward.apply(first + (factor * y).sum(), ValueError("bad batch"))
    if fails == "function":
        first = FailingBackward.apply(first, ValueError("bad batch"))
    elif fails == "hook":
        first = first.clone()
        first.register_hook(raise_bad_batch)
    return first + (factor * y).sum()


class Training:
    """Steps on batches, which are numbers; rank 1 cannot compute the gradients of one."""

    def __init__(self, fails: str, ranks: tuple[int, ...] = (1,), device: str = "cpu") -> None:
        self.parameters = [nn.Parameter(torch.zeros(1, device=device)) for _ in "xy"]
        self.optimizer = hvd.DistributedOptimizer(SGD(self.parameters, lr=1.0))
        self.fails = fails if hvd.rank() in ranks else ""
        self.steps = 0

    def backward(self, batch: int, *, fails: bool) -> None:
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
    training.backward(batch, fails=False)
    training.step()


EVENTS = [leave_out, step, zero_and_step, synchronize, repeat]


def assert_told(results: list[tuple[int, str, str]]) -> None:
    for rank, (steps, kind, text) in enumerate(results):
        assert kind == ("RingError" if rank == 1 else "PeerLostError")
        assert HINT in text
        assert f"rank 1{'' if rank == 1 else ' ('}" in text
        assert steps == FAILING


def go_on_alone(go_on: Callable[[Training, int], None], fails: str) -> tuple[int, str, str]:
    training = Training(fails)
    kind, text = error_of(lambda: training.train(go_on))
    return training.steps, kind, text


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "transport", "env"),
    [
        (2, "shm", {}),
        (2, "tcp", SMALL_BUCKETS),
        pytest.param(2, "tcp", {}, marks=slow),
        pytest.param(3, "tcp", {}, marks=slow),
        pytest.param(3, "shm", SMALL_BUCKETS, marks=slow),
    ],
)
@pytest.mark.parametrize("go_on", EVENTS, ids=lambda function: function.__name__)
def test_one_rank_goes_on_alone(size, transport, env, go_on):
    for fails in ("function", "hook"):
        args = (go_on, fails)
        assert_told(run(go_on_alone, size, args=args, transport=transport, env=env))


def go_on_together(go_on: Callable[[Training, int], None]) -> None:
    training = Training("function", ranks=(0, 1, 2))
    training.train(go_on)
    batches = set(range(STEPS))
    training.check(*(batches if go_on is repeat else batches - {FAILING}))


@pytest.mark.parametrize("go_on", [leave_out, repeat], ids=["leave_out", "repeat"])
@on_both_transports
def test_all_ranks_go_on(transport, go_on):
    """No rank is ahead of another."""
    run(go_on_together, 2, args=(go_on,), transport=transport)


def agree_on_failures(then: str) -> None:
    """The way that docs/errors.md recommends."""
    training = Training("function")
    optimizer = training.optimizer
    for batch in range(STEPS):
        fails = batch == FAILING
        while True:
            optimizer.zero_grad()
            failed = False
            with optimizer.no_sync():
                try:
                    training.backward(batch, fails=fails)
                except ValueError:
                    failed = True
            if not hvd.any_rank(failed):
                training.step()
                break
            fails = False
            if then == "leave out":
                break
    training.check(*(batch for batch in range(STEPS) if then == "repeat" or batch != FAILING))


@pytest.mark.parametrize("then", ["leave out", "repeat"])
@pytest.mark.parametrize(("transport", "env"), [("shm", {}), ("tcp", SMALL_BUCKETS)])
def test_ranks_that_agree_on_a_failure(transport, env, then):
    run(agree_on_failures, 2, args=(then,), transport=transport, env=env)


def fail_before_any_gradient(go_on: Callable[[Training, int], None]) -> None:
    """Nothing tells this rank of the failure, and nothing of the pass has begun."""
    training = Training("first")
    training.train(go_on)
    if go_on is repeat:
        training.check(*range(STEPS))
        return
    total = sum(hvd.size() * (100 * (hvd.size() + 1) / 2 + batch) for batch in range(STEPS))
    missing = 200 + FAILING  # rank 1's gradient counts as zero
    expected = -(total - missing) / hvd.size()
    assert [parameter.item() for parameter in training.parameters] == [expected] * 2


@pytest.mark.parametrize("go_on", [repeat, step], ids=["repeat", "step"])
@pytest.mark.parametrize(("transport", "env"), [("shm", {}), ("tcp", SMALL_BUCKETS)])
def test_a_failure_before_any_gradient(transport, env, go_on):
    run(fail_before_any_gradient, 2, args=(go_on,), transport=transport, env=env)


def fail_without_consequence(way: str) -> None:
    """Nothing of the failed pass was to be averaged, so no rank is ahead of another."""
    x, y = weights(0, 0)
    others = weights(0, 0)
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=0.0))

    def fail() -> None:
        loss = loss_of(*(others if way == "others" else (x, y)), 1.0, "function")
        if way == "grad":
            torch.autograd.grad(loss, [x, y])
        with optimizer.no_sync() if way == "no_sync" else contextlib.nullcontext():
            loss.backward()

    for number in range(4):
        optimizer.zero_grad()
        if number == 2 and hvd.rank() == hvd.size() - 1:
            with pytest.raises(ValueError, match="bad batch"):
                fail()
            optimizer.zero_grad()
        loss_of(x, y, hvd.rank() + number, "").backward()
        assert grads([x, y]) == [number + (hvd.size() - 1) / 2] * 2
        optimizer.step()


@pytest.mark.parametrize(
    ("way", "size"), [("no_sync", 2), ("grad", 2), ("others", 2), ("alone", 1)]
)
def test_a_failure_without_consequence(way, size):
    run(fail_without_consequence, size, args=(way,))


def fail_in_the_first_of_two_passes() -> None:
    """The pass is not averaged: its gradients are dropped, or left to the next one."""
    x, y = weights(0, 0)
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=0.0), backward_passes_per_step=2)
    for number in range(4):
        optimizer.zero_grad()
        if number == 2 and hvd.rank() == 1:
            with pytest.raises(ValueError, match="bad batch"):
                loss_of(x, y, 1.0, "function").backward()
            optimizer.zero_grad()
        for _ in range(2):
            loss_of(x, y, hvd.rank() + number, "").backward()
        assert grads([x, y]) == [2 * number + 1] * 2
        optimizer.step()


@on_both_transports
def test_a_failure_in_the_first_of_two_passes(transport):
    run(fail_in_the_first_of_two_passes, 2, transport=transport, env=SMALL_BUCKETS)


def fails_in(number: int, x: nn.Parameter, y: nn.Parameter) -> bool:
    """Run a backward pass, and return whether it has failed. Pass 3 does on rank 1."""
    fails = number == 2 and hvd.rank() == 1
    try:
        loss_of(x, y, 1.0, "function" if fails else "").backward()
    except ValueError:
        return True
    return False


def expect_given_up(failures: list[tuple[str, str]]) -> None:
    for kind, text in failures:
        assert kind in ("RingError", "PeerLostError")
        assert "backward pass 3 has failed (ValueError: bad batch)" in text


def use_another_optimizer() -> tuple[str, str]:
    """After a failed pass of one optimizer, rank 1's next pass is another one's."""
    x, y, z = weights(0, 0, 0)
    one = hvd.DistributedOptimizer(SGD([x, y], lr=1.0))
    other = hvd.DistributedOptimizer(SGD([z], lr=1.0))

    def go_on() -> None:
        for number in range(4):
            if fails_in(number, x, y):
                other.zero_grad()
                z.backward()
                other.step()
            one.step()
            one.zero_grad()

    return error_of(go_on)


@pytest.mark.parametrize(("transport", "env"), [("shm", {}), ("tcp", SMALL_BUCKETS)])
def test_the_next_pass_is_of_another_optimizer(transport, env):
    expect_given_up(run(use_another_optimizer, 2, transport=transport, env=env))


def join_after_a_failure() -> tuple[str, str]:
    """Gradients of the failed pass are on their way to the others."""
    x, y = weights(0, 0)
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=1.0))

    def go_on() -> None:
        for number in range(4):
            if fails_in(number, x, y):
                break
            optimizer.step()
            optimizer.zero_grad()
        hvd.join()

    return error_of(go_on)


def test_a_join_after_gradients_were_sent():
    expect_given_up(run(join_after_a_failure, 2, transport="tcp", env=SMALL_BUCKETS))


def go_on_after_an_error_of_all_ranks() -> tuple[str, str]:
    """The ranks are in different steps when a bucket has been sent already."""
    training = Training("")
    for batch in range(2):
        training.optimizer.zero_grad()
        training.backward(batch, fails=False)
        training.step()
    if hvd.rank() == 1:
        with training.optimizer.skip_synchronize():
            training.optimizer.step()
    training.optimizer.zero_grad()
    kind, text = error_of(lambda: training.backward(2, fails=False))
    assert kind == "MismatchError", text
    training.optimizer.zero_grad()
    return error_of(lambda: training.backward(3, fails=False))


def test_a_pass_after_one_whose_buckets_were_sent_in_vain():
    failures = run(go_on_after_an_error_of_all_ranks, 2, transport="tcp", env=SMALL_BUCKETS)
    for kind, text in failures:
        assert kind in ("RingError", "PeerLostError"), text
        assert "which only shutdown() and init() can mend" in text


def go_on_after_waiting_for_another_collective() -> None:
    """One rank's pass meets another rank's allreduce; then both train."""
    training = Training("")
    training.optimizer.zero_grad()
    training.backward(0, fails=False)
    training.step()
    training.optimizer.zero_grad()
    if hvd.rank() == 0:
        kind, text = error_of(lambda: training.backward(1, fails=False))
    else:
        kind, text = error_of(lambda: hvd.allreduce(torch.ones(1), name="m"))
    assert kind == "MismatchError", text
    training.optimizer.zero_grad()
    training.backward(2, fails=False)
    training.step()
    training.check(0, 2)


def test_a_pass_after_one_that_met_another_collective():
    run(go_on_after_waiting_for_another_collective, 2)
