"""Gradients kept by a program: their values stay for any size, as in torch."""

from collections.abc import Callable

import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from worlds import on_both_transports

import torch_ring as hvd

SIZES = (3, 5, 40, 1000)
SMALL = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "4000"}  # the last one lies in a block, if any does


KEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1)[1:],
    "a NumPy array": lambda gradient: torch.from_numpy(gradient.numpy()),
    "a detached one": lambda gradient: gradient.detach(),
}


def keep_gradients(kept_as: str, drop: str) -> None:
    """Each parameter's gradient is kept in turn; other gradients and its next one are right."""
    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
    kept: list[tuple[Tensor, Tensor]] = []
    mean = (hvd.size() + 1) / 2
    for step in range(12):
        if drop == "by the optimizer":
            optimizer.zero_grad()
        else:
            for parameter in parameters:
                parameter.grad = None
        used = [p for i, p in enumerate(parameters) if step % 5 != i]
        sum((step + 1) * (hvd.rank() + 1) * p.sum() for p in used).backward()
        for parameter in used:
            assert torch.equal(parameter.grad, torch.full_like(parameter, (step + 1) * mean))
        for gradient, values in kept:
            assert torch.equal(gradient, values)
        parameter = parameters[step % len(parameters)]
        if parameter.grad is not None:
            gradient = KEEP[kept_as](parameter.grad)
            kept.append((gradient, gradient.clone()))
        optimizer.step()
    assert len(kept) > 6


def keep_one_of_a_bucket() -> None:
    """The other gradients move with the bucket, and still accumulate."""
    one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([one, other], lr=0.0), op=hvd.Sum)
    ((hvd.rank() + 1) * (one + other).sum()).backward()
    kept, one.grad = one.grad, None
    (5 * (hvd.rank() + 1) * one.sum()).backward()
    assert torch.equal(kept, torch.full((3,), 3.0))
    assert torch.equal(one.grad, torch.full((3,), 15.0))
    ((hvd.rank() + 1) * (one + other).sum()).backward()
    assert torch.equal(one.grad, torch.full((3,), 18.0))
    assert torch.equal(other.grad, torch.full((3,), 6.0))
    optimizer.step()
    assert torch.equal(other.grad, torch.full((3,), 6.0))


def look_at_gradients() -> None:
    """Gradients that are not kept get the same memory in each step, without a new allocation."""
    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1))
    places = set()
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        sum(p.sum() for p in parameters).backward()
        gradients = [p.grad for p in parameters]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step > 0:  # after the first pass the buckets are planned anew
            places.add(tuple(gradient.data_ptr() for gradient in gradients))
        del gradients
    assert len(places) == 1


@pytest.mark.parametrize(
    ("check", "args"),
    [
        *((keep_gradients, (kept_as, "by the optimizer")) for kept_as in KEEP),
        (keep_gradients, ("itself", "by hand")),
        (keep_one_of_a_bucket, ()),
        (look_at_gradients, ()),
    ],
)
@on_both_transports
def test_kept_gradients(transport, check, args):
    run(check, 2, args=args, transport=transport, env=SMALL)
