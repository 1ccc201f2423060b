# SPDX-License-Identifier: Apache-2.0
"""Gradients that a program keeps, assigns, writes or moves; those in its memory get the average."""

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from training import joined_batches, make_model, part, train
from worlds import on_both_transports

import torch_ring as hvd

SMALL = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "512"}  # half of the gradients lie in blocks


def leave_parameters_out(op: hvd.ReduceOp) -> None:
    """A gradient untouched by passes stays: a write to its neighbours does not count as its own."""
    share = 1.0 if op == hvd.Average else 1.0 / hvd.size()
    used, unused, seldom = (nn.Parameter(torch.ones(200).double()) for _ in range(3))
    flat = torch.zeros(600).double()
    for index, parameter in enumerate((used, unused, seldom)):
        parameter.grad = flat[200 * index : 200 * (index + 1)]
    optimizer = hvd.DistributedOptimizer(SGD([used, unused, seldom], lr=0.0), op=op)
    for step in range(4):
        loss = (hvd.rank() + 1) * share * used.sum()
        if step == 0 and hvd.rank() == 0:
            loss = loss + share * seldom.sum()
        loss.backward()
        # This step has not reduced the last part: a write sets it, and a Sum adds that.
        written = flat if op == hvd.Average else flat[:400]
        written.mul_(2.0)
        optimizer.step()
        mean, zero = (hvd.size() + 1) / 2, torch.zeros(200).double()
        expected = torch.cat(
            [
                zero + sum(mean * 2.0**k for k in range(1, step + 2)),
                zero,
                zero + (2.0 ** (step + 1) if op == hvd.Average else 1.0) / hvd.size(),
            ]
        )
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


class Array(np.ndarray):
    """An array that supports weak references."""


def let_memory_go() -> None:
    x = nn.Parameter(torch.ones(200))
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    memory = np.zeros(200, dtype=np.float32).view(Array)
    x.grad = torch.from_numpy(memory)
    alive = weakref.ref(memory)
    del memory
    x.sum().backward()
    optimizer.step()
    assert alive() is not None
    optimizer.zero_grad()
    assert alive() is None


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (leave_parameters_out, (hvd.Average,)),
        (leave_parameters_out, (hvd.Sum,)),
        (give_what_cannot_be_written, ()),
        (give_on_one_rank, ()),
        (replace_during_a_pass, ()),
        (let_memory_go, ()),
    ],
)
@on_both_transports
def test_given_gradients(transport, check, args):
    run(check, 2, args=args, transport=transport, env=SMALL)


def write_gradients(op: hvd.ReduceOp) -> None:
    """Values written into gradients of the previous step are reduced, once."""
    model = make_model()
    x = model[0].weight
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=1.0), op=op)
    train(model, optimizer, [part(joined_batches(steps=1)[0])])
    for zero in (lambda: optimizer.zero_grad(False), lambda: model.zero_grad(False), lambda: None):
        zero()
        x.grad.fill_(hvd.rank() + 1.0)
        before = x.detach().clone()
        optimizer.step()
        expected = before - (3.0 if op == hvd.Sum else 1.5)
        torch.testing.assert_close(x.detach(), expected)
    optimizer.step()  # with the same gradient as before, which is reduced
    torch.testing.assert_close(x.detach(), expected - (3.0 if op == hvd.Sum else 1.5))


def change_reduced_gradients(op: hvd.ReduceOp) -> None:
    """Changes of reduced gradients by the program are left alone, though step() has to agree."""
    used, by_hand, unused = parameters = [nn.Parameter(torch.zeros(1).double()) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0), op=op)
    mean = sum(range(1, hvd.size() + 1)) / (1 if op == hvd.Sum else hvd.size())
    for step in range(3):
        optimizer.zero_grad()
        (used * (hvd.rank() + 1)).backward()
        assert used.grad.item() == pytest.approx(mean, rel=0, abs=1e-10)
        by_hand.grad = torch.full_like(by_hand, hvd.rank() + 1.0)
        if step == 0:
            used.grad = used.grad.clamp(max=0.5)
        elif step == 1:
            used.grad.mul_(0.5 / mean)
        else:
            optimizer.synchronize()
            used.grad = used.grad.clamp(max=0.5)
            unused.grad = torch.full_like(unused, hvd.rank() + 1.0)
        optimizer.step()
        assert used.item() == pytest.approx(-0.5 * (step + 1), rel=0, abs=1e-10)
        assert by_hand.item() == pytest.approx(-mean * (step + 1), rel=0, abs=1e-10)
    assert unused.item() == pytest.approx(-mean, rel=0, abs=1e-10)


def change_dtype() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    batch = part(joined_batches(steps=1)[0])
    train(model, optimizer, [batch])
    model.double()
    changed = r"'.*' has changed its dtype from Float to Double .* convert the model first"
    with pytest.raises(ValueError, match=changed):
        train(model, optimizer, [batch.double()])


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
    ("check", "args"),
    [
        (write_gradients, (hvd.Average,)),
        (write_gradients, (hvd.Sum,)),
        (change_reduced_gradients, (hvd.Average,)),
        (change_reduced_gradients, (hvd.Sum,)),
        (change_dtype, ()),
        (take_away_and_give_back, ()),
    ],
)
def test_gradients_by_hand(check, args):
    run(check, 2, args=args)


SIZES = (3, 5, 40, 1000)
LAST_IN_A_BLOCK = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "4000"}  # if any lies in one


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
    run(check, 2, args=args, transport=transport, env=LAST_IN_A_BLOCK)
