# SPDX-License-Identifier: Apache-2.0
"""Gradients that a program keeps, assigns, writes or moves; those in its memory get the average."""

from collections.abc import Callable

import pytest
import torch
from on_ranks import on_ranks
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from training import joined_batches, make_model, part, weights
from worlds import on_both_transports

import torch_ring as hvd

SMALL = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "512"}  # half of the gradients lie in blocks


def leave_parameters_out() -> None:
    """A gradient untouched by passes stays: a write to its neighbours does not count as its own."""
    used, unused, seldom = (nn.Parameter(torch.ones(200).double()) for _ in range(3))
    flat = torch.zeros(3, 200).double()
    for parameter, gradient in zip((used, unused, seldom), flat, strict=True):
        parameter.grad = gradient
    optimizer = hvd.DistributedOptimizer(SGD([used, unused, seldom], lr=0.0), op=hvd.Sum)
    expected = torch.zeros_like(flat)
    for step in range(4):
        loss = (hvd.rank() + 1) * used.sum()
        if step == 0 and hvd.rank() == 0:
            loss = loss + seldom.sum()
        loss.backward()
        flat[:2].mul_(2.0)
        optimizer.step()
        expected[0] = 2 * (expected[0] + hvd.size() * (hvd.size() + 1) / 2)
        expected[2] = 1.0
        torch.testing.assert_close(flat, expected, rtol=1e-10, atol=1e-10)


def give_what_cannot_be_written() -> None:
    """An expanded gradient, and one made in inference mode: they are read, and replaced."""
    x, y = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([x, y], lr=1.0))
    for step in range(2):
        (x.grad,) = torch.autograd.grad((hvd.rank() + 1) * x.sum(), x)
        assert x.grad.stride() == (0,)
        with torch.inference_mode():
            y.grad = torch.full((3,), hvd.rank() + 1.0)
        optimizer.step()
        for parameter in (x, y):
            assert torch.equal(parameter.detach(), torch.full((3,), 1 - 1.5 * (step + 1)))


def give_on_one_rank() -> None:
    """One rank alone gives memory; ranks without a gradient get one in memory of their own."""
    x, y = (nn.Parameter(torch.ones(200)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        SGD([x, y], lr=0.0), compression=hvd.Compression.bf16, backward_passes_per_step=1
    )
    flat = torch.zeros(400)
    for _ in range(3):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            x.grad, y.grad = flat.zero_().split(200)
        loss = (hvd.rank() + 1) * x.sum()
        (loss if hvd.rank() else loss + 4 * y.sum()).backward()
        assert torch.equal(x.grad, torch.full((200,), 1.5))
        assert torch.equal(y.grad, torch.full((200,), 2.0))
        if hvd.rank() == 0:
            assert torch.equal(flat, torch.cat([x.grad, y.grad]))
        optimizer.step()


def replace_during_a_pass() -> None:
    """A bucket that gets new memory in a pass keeps the gradients that have arrived."""
    kept, given, replaced = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(SGD([kept, given, replaced], lr=0.0))
    (kept + given + replaced).sum().backward()
    held, kept.grad = kept.grad, None
    optimizer.step()
    given.grad = torch.zeros(3)
    replaced.grad = None
    ((hvd.rank() + 1) * (kept + given + replaced)).sum().backward()
    for parameter in (kept, given, replaced):
        assert torch.equal(parameter.grad, torch.full((3,), 1.5))
    assert torch.equal(held, torch.ones(3))


@pytest.mark.parametrize(
    "check",
    [
        leave_parameters_out,
        give_what_cannot_be_written,
        give_on_one_rank,
        replace_during_a_pass,
    ],
)
@on_both_transports
def test_given_gradients(transport, check):
    run(check, 2, transport=transport, env=SMALL)


def write_gradients() -> None:
    """Values written into gradients of the previous step are reduced, once."""
    x = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=1.0), op=hvd.Sum)
    x.sum().backward()
    optimizer.step()
    for zeroed in (True, False):
        if zeroed:
            optimizer.zero_grad(set_to_none=False)
        x.grad.fill_(hvd.rank() + 1.0)
        before = x.detach().clone()
        optimizer.step()
        assert torch.equal(x, before - 3.0)
    optimizer.step()  # with the same gradient as before, which is reduced
    assert torch.equal(x, before - 6.0)


def change_reduced_gradients() -> None:
    """Changes of reduced gradients by the program are left alone, though step() has to agree."""
    used, by_hand, unused = parameters = [nn.Parameter(torch.zeros(1).double()) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0), op=hvd.Sum)
    total = 3.0
    for step in range(3):
        optimizer.zero_grad()
        (used * (hvd.rank() + 1)).backward()
        assert used.grad.item() == total
        by_hand.grad = torch.full_like(by_hand, hvd.rank() + 1.0)
        if step == 0:
            used.grad = used.grad.clamp(max=0.5)
        elif step == 1:
            used.grad.mul_(0.5 / total)
        else:
            optimizer.synchronize()
            used.grad = used.grad.clamp(max=0.5)
            unused.grad = torch.full_like(unused, hvd.rank() + 1.0)
        optimizer.step()
        assert used.item() == pytest.approx(-0.5 * (step + 1))
        assert by_hand.item() == -total * (step + 1)
    assert unused.item() == -total


def set_beside_another_optimizer() -> None:
    """The older of two optimizers steps with gradients that the program has set."""
    for with_pass in (False, True):
        trunk, own = weights(0, 0)
        first = hvd.DistributedOptimizer(SGD([trunk, own], lr=1.0))
        later = hvd.DistributedOptimizer(SGD([trunk], lr=1.0))
        for number, set_to_none in enumerate([True, False, True]):
            trunk.data.zero_()
            if number:
                first.zero_grad(set_to_none=set_to_none)
                trunk.grad = torch.full_like(trunk, 1.0 + hvd.rank())
                if with_pass:
                    own.sum().backward()
            else:
                ((trunk + own) * (1 + hvd.rank())).backward()
            first.step()
            assert trunk.item() == -1.5
        del later


def take_away_and_give_back() -> None:
    """A gradient that was reduced, put away and assigned again is not reduced again."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.0), op=hvd.Sum)
    weight = model[0].weight
    for _ in range(2):
        optimizer.zero_grad()
        model(part(joined_batches(steps=1)[0])).sum().backward()
        weight.grad.mul_(1.0)
        reduced, values = weight.grad, weight.grad.clone()
        optimizer.zero_grad()
        weight.grad = reduced
        optimizer.step()
        assert torch.equal(weight.grad, values)


@pytest.mark.parametrize(
    "check",
    [
        write_gradients,
        change_reduced_gradients,
        set_beside_another_optimizer,
        take_away_and_give_back,
    ],
)
def test_gradients_by_hand(check):
    run(check, 2)


SIZES = (3, 5, 40, 1000)
LAST_IN_A_BLOCK = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "4000"}  # if any lies in one

KEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1)[1:],
    "a NumPy array": lambda gradient: torch.from_numpy(gradient.numpy()),
    "a detached one": lambda gradient: gradient.detach(),
}


@pytest.mark.parametrize("kept_as", KEEP)
@on_both_transports
@on_ranks(2, env=LAST_IN_A_BLOCK)
def test_kept_gradients(transport, kept_as: str) -> None:
    """Each parameter's gradient is kept in turn; other gradients and its next one are right."""
    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
    kept: list[tuple[Tensor, Tensor]] = []
    mean = (hvd.size() + 1) / 2
    for step in range(12):
        if step % 3:
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
