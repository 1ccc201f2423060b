"""Passes that add to averaged gradients: the averaged part stays, and is not sent again."""

from __future__ import annotations

import pytest
import torch
from pool import error_of, run
from torch import Tensor, nn
from torch.optim import SGD
from training import grads, weights
from worlds import on_both_transports

import torch_ring as hvd

SIZES = (3, 70_000)  # of which the second is reduced where it is computed, in shared memory


def of_rank(scale: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + hvd.rank())
    return [scale * torch.randn(size, generator=generator) for size in SIZES]


def add_exactly(op: hvd.ReduceOp, flat: bool) -> None:
    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=op)
    memory = torch.zeros(sum(SIZES))

    def begin() -> None:
        optimizer.zero_grad()
        if flat:
            memory.zero_()
            for parameter, part in zip(parameters, memory.split(SIZES), strict=True):
                parameter.grad = part

    def backward(scale: float, seed: int) -> list[Tensor]:
        parts = zip(parameters, of_rank(scale, seed), strict=True)
        sum((parameter * part).sum() for parameter, part in parts).backward()
        return [parameter.grad.clone() for parameter in parameters]

    for _ in range(3):
        begin()
        large = backward(1e6, 1)
        begin()
        small = backward(1e-3, 2)
        begin()
        backward(1e6, 1)
        both = backward(1e-3, 2)
        for first, second, found in zip(large, small, both, strict=True):
            assert torch.equal(found, first + second)
        optimizer.step()


@on_both_transports
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("flat", [False, True])
def test_the_sum_of_two_passes_is_that_of_two_averages(transport, op, flat):
    """Bit by bit, though the first is 10^9 times larger."""
    run(add_exactly, 3, args=(op, flat), transport=transport)


def accumulate_on_averages(op: hvd.ReduceOp) -> None:
    """Until they are sent, later gradients lie in `grad` beside the averaged part."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0), op=op)
    rank, size = hvd.rank(), hvd.size()
    total, count = sum(range(1, size + 1)), 1 if op == hvd.Sum else size
    (x * (1 + rank)).backward()
    assert x.grad.item() == pytest.approx(total / count)
    with optimizer.no_sync():
        for number in range(2):
            (x * 10 * (1 + rank)).backward()
            assert x.grad.item() == pytest.approx(total / count + 10 * (number + 1) * (1 + rank))
    (x * 100 * (1 + rank)).backward()
    assert x.grad.item() == pytest.approx(121 * total / count)
    with optimizer.no_sync():
        (x * 1000 * (1 + rank)).backward()
    optimizer.step()
    assert x.grad.item() == pytest.approx(1121 * total / count)


@on_both_transports
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_passes_under_no_sync(transport, op):
    run(accumulate_on_averages, 3, args=(op,), transport=transport)


def fail_before_it_accumulates() -> None:
    """A hook of the program raises after the averaged part was copied out."""
    x, y = weights(0, 0)
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=0.0))
    (x + y).backward()
    accumulator = x.view_as(x).grad_fn.next_functions[0][0]

    def refuse(_: object) -> None:
        raise ValueError("not now")

    handle = accumulator.register_prehook(refuse)
    with optimizer.no_sync(), pytest.raises(ValueError, match="not now"):
        (3 * x).backward()
    handle.remove()
    assert grads([x, y]) == [1, 1]
    (x * (hvd.rank() + 1)).backward()
    assert grads([x, y]) == [1 + 1.5, 1]


@on_both_transports
def test_a_pass_that_fails_gives_the_averaged_part_back(transport):
    run(fail_before_it_accumulates, 2, transport=transport)


def drop_on_one_rank(when: str) -> tuple[str, str]:
    x, y = weights(1, 2)
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=0.1), [("x", x), ("y", y)])
    (x + y).backward()
    if when == "in the pass before the step":
        optimizer.step()
    if hvd.rank() == 1:
        x.grad = None
    uses_x = hvd.rank() == 0 or when != "and then lacks one"

    def go_on() -> None:
        (y + x if uses_x else y).backward()

    return error_of(go_on)


@on_both_transports
@pytest.mark.parametrize(
    "when", ["in the same step", "in the pass before the step", "and then lacks one"]
)
def test_ranks_that_do_not_carry_alike(transport, when):
    """Each would end with another gradient."""
    for kind, text in run(drop_on_one_rank, 2, args=(when,), transport=transport):
        assert kind in ("MismatchError", "RingError", "PeerLostError")
        assert "the gradient of 'x' was added to an averaged one on some ranks only" in text, text
