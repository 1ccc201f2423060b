"""Parameters whose gradients several wrapped optimizers reduce."""

import gc
from collections.abc import Callable

import pytest
import torch
from pool import eventually, run
from slow import on_shm_and_slowly_on_tcp
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import torch_ring as hvd

on_both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])
both_ops = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])


def scalars(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in values]


def joined(op: hvd.ReduceOp, value_of: Callable[[int], float]) -> float:
    """Return the reduction of all ranks' values."""
    total = sum(value_of(rank) for rank in range(hvd.size()))
    return total if op == hvd.Sum else total / hvd.size()


def assert_near(tensor: Tensor | None, value: float) -> None:
    assert tensor is not None
    assert abs(tensor.item() - value) < 1e-10, (tensor.item(), value)


def meet_between_the_hooks() -> None:
    """A hook of the program, between the two optimizers', is slow on rank 0."""
    (trunk,) = scalars(0)
    accumulator = trunk.expand_as(trunk).grad_fn.next_functions[0][0]
    first = hvd.DistributedOptimizer(SGD([trunk], lr=1.0))

    def wait(*_: object) -> None:
        if hvd.rank() == 0:  # meanwhile the first one's bucket must not be reduced
            assert not eventually(lambda: trunk.grad.item() != 10, 0.2)

    accumulator.register_hook(wait)
    second = hvd.DistributedOptimizer(SGD([trunk], lr=1.0))
    for optimizer in (first, second):
        trunk.grad = None
        (trunk * (10 if hvd.rank() == 0 else 2)).backward()
        assert_near(trunk.grad, 6)
        optimizer.step()


@on_both_transports
def test_a_bucket_is_not_sent_before_all_have_copied(transport):
    run(meet_between_the_hooks, 2, transport=transport)


def accumulate(op: hvd.ReduceOp, passes: int, synchronised: int, zero: str) -> None:
    """An actor and a critic with a trunk, in several backward passes a step."""
    trunk, actor, critic = scalars(1, 2, 3)
    optimizers = [
        hvd.DistributedOptimizer(
            SGD([own, trunk], lr=0.25), op=op, backward_passes_per_step=synchronised
        )
        for own in (actor, critic)
    ]
    expected, kept = 1.0, 0.0
    for step in range(4):
        if zero == "by the model":
            for parameter in (trunk, actor, critic):
                parameter.grad = None
        else:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=zero == "to none")
        gradient = 0.0
        for number in range(passes):
            factor = 1.0 + hvd.rank() + step + number
            ((actor + critic + trunk) * factor).sum().backward()
            gradient += joined(op, lambda rank, s=step, n=number: 1.0 + rank + s + n)
        if passes >= synchronised:
            assert_near(trunk.grad, gradient)
        for optimizer in optimizers:
            optimizer.step()
            assert_near(trunk.grad, gradient)
            expected -= 0.25 * gradient
        assert_near(trunk, expected)
        kept -= 0.25 * gradient
        assert_near(actor, 2 + kept)
        assert_near(critic, 3 + kept)


@pytest.mark.parametrize(("transport", "op"), [("shm", hvd.Average), ("tcp", hvd.Sum)])
@pytest.mark.parametrize("zero", ["to none", "to zero", "by the model"])
@pytest.mark.parametrize(("passes", "synchronised"), [(1, 1), (2, 1), (2, 2), (1, 2)])
def test_a_shared_trunk(transport, op, zero, passes, synchronised):
    run(accumulate, 3, args=(op, passes, synchronised, zero), transport=transport)


def replace(op: hvd.ReduceOp) -> None:
    """A scheduler holds an optimizer whose place another one has taken."""
    parameters = scalars(1, 2)
    before = hvd.DistributedOptimizer(SGD(parameters, lr=0.25), op=op)
    scheduler = StepLR(before, 1)
    after = hvd.DistributedOptimizer(SGD(parameters, lr=0.25), op=op)
    del before
    expected = [1.0, 2.0]
    for step in range(4):
        if step == 2:
            del scheduler
            gc.collect()
        after.zero_grad()
        for number in range(2):
            factor = 1.0 + hvd.rank() + number
            (parameters[0] * factor + parameters[1] * (factor + step)).sum().backward()
        after.step()
        for number in range(2):
            expected[0] -= 0.25 * joined(op, lambda rank, n=number: 1.0 + rank + n)
            expected[1] -= 0.25 * joined(op, lambda rank, n=number, s=step: 1.0 + rank + n + s)
        for parameter, value in zip(parameters, expected, strict=True):
            assert_near(parameter, value)


@on_both_transports
@both_ops
def test_an_optimizer_in_the_place_of_another(transport, op):
    run(replace, 3, args=(op,), transport=transport)


def train_with_random_delays(steps: int) -> None:
    """Ranks that are late at random, with trunks of several sizes, against one process."""
    torch.manual_seed(hvd.rank())
    size = hvd.size()
    trunk = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (1, 100, 30000)]
    heads = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (7, 50000)]
    optimizers = [hvd.DistributedOptimizer(SGD([*trunk, head], lr=0.0)) for head in heads]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for parameter in trunk:
            assert parameter.grad is None
        factor = float(hvd.rank() * 3 + step)
        sum((p * factor).sum() for p in (*trunk, *heads)).backward()
        mean = sum(rank * 3 + step for rank in range(size)) / size
        for parameter in (*trunk, *heads):
            assert (parameter.grad - mean).abs().max() < 1e-10
        for optimizer in optimizers:
            optimizer.step()


@on_shm_and_slowly_on_tcp
def test_many_steps_of_a_shared_trunk(transport):
    env = {"TORCH_RING_BUCKET_BYTES": "8192"}
    run(train_with_random_delays, 2, args=(100,), transport=transport, env=env)
