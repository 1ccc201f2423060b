"""Gradients in memory of the program's: `p.grad = flat[a:b]`; the average comes back to it."""

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from training import joined_batches, loss_of, make_model, part
from worlds import on_both_transports

import torch_ring as hvd

STEPS = 6
SMALL = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "512"}  # half of the gradients lie in blocks


class Flat:
    """A model whose gradients lie in one tensor, and a step that reads only that tensor."""

    def __init__(self, model: nn.Module, lay: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        self.parameters = list(model.parameters())
        self.gradients = torch.zeros(2 * sum(p.numel() for p in self.parameters)).double()
        self.given: list[Tensor] = []
        begin = 0
        for parameter in self.parameters:
            self.given.append(lay(self.gradients[begin:], parameter))
            parameter.grad = self.given[-1]
            begin += 2 * parameter.numel()

    def step(self) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, self.given, strict=True):
                parameter -= 0.1 * gradient


def in_a_row(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    return flat[: parameter.numel()].view_as(parameter)


def transposed(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    return in_a_row(flat, parameter).reshape(parameter.shape[::-1]).t()


def with_holes(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    return flat[: 2 * parameter.numel() : 2].view(parameter.shape)


def in_numpys_memory(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    return torch.from_numpy(in_a_row(flat, parameter).numpy())


LAYOUTS = [in_a_row, transposed, with_holes, in_numpys_memory]


def assert_same(ours: nn.Module, expected: nn.Module) -> None:
    for mine, right in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


def train_on_flat(lay: Callable[[Tensor, nn.Parameter], Tensor], op: hvd.ReduceOp) -> None:
    """A step of the program's own, which reads its memory; one pass a step, or two, or no_sync."""
    share = 1.0 if op == hvd.Average else 1.0 / hvd.size()
    for passes in (1, 2, 0):
        alone, together = make_model().double(), make_model().double()
        right, ours = Flat(alone, lay), Flat(together, lay)
        optimizer = hvd.DistributedOptimizer(
            SGD(together.parameters(), lr=0.0), op=op, backward_passes_per_step=max(passes, 1)
        )
        for batch in joined_batches(STEPS):
            batch = batch.double()
            right.gradients.zero_()
            ours.gradients.zero_()
            for scale in (1.0, 0.5) if passes != 1 else (1.0,):
                (scale * loss_of(alone, batch)).backward()
                loss = share * scale * loss_of(together, part(batch))
                if passes == 0 and scale == 1.0:
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            for parameter, given in zip(together.parameters(), ours.given, strict=True):
                assert parameter.grad is given
            torch.testing.assert_close(ours.gradients, right.gradients, rtol=1e-10, atol=1e-10)
            optimizer.step()
            right.step()
            ours.step()
        assert_same(together, alone)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("lay", LAYOUTS)
@on_both_transports
def test_a_step_of_the_programs_own(transport, lay, op):
    run(train_on_flat, 2, args=(lay, op), transport=transport, env=SMALL)


def give_anew(how: str) -> None:
    """The memory is given again in each step, by assignment or through .data, then by hand."""
    alone, together = make_model().double(), make_model().double()
    optimizers = [SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (alone, together)]
    hvd.DistributedOptimizer(optimizers[1])
    for batch in joined_batches(STEPS):
        for model, optimizer, rows in zip(
            (alone, together), optimizers, (batch, part(batch)), strict=True
        ):
            parameters = list(model.parameters())
            optimizer.zero_grad(set_to_none=how != "data")
            given = [torch.zeros_like(parameter) for parameter in parameters]
            if how == "by hand":
                given = list(torch.autograd.grad(loss_of(model, rows.double()), parameters))
            for parameter, gradient in zip(parameters, given, strict=True):
                if how == "data" and parameter.grad is not None:
                    parameter.grad.data = gradient
                else:
                    parameter.grad = gradient
            if how != "by hand":
                loss_of(model, rows.double()).backward()
            optimizer.step()
            for parameter, gradient in zip(parameters, given, strict=True):
                assert parameter.grad.data_ptr() == gradient.data_ptr()
                assert torch.equal(parameter.grad, gradient)
    assert_same(together, alone)


@pytest.mark.parametrize("how", ["assigned", "data", "by hand"])
@on_both_transports
def test_memory_that_is_given_in_each_step(transport, how):
    run(give_anew, 2, args=(how,), transport=transport, env=SMALL)


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


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@on_both_transports
def test_gradients_that_no_pass_touches(transport, op):
    run(leave_parameters_out, 2, args=(op,), transport=transport, env=SMALL)


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


def test_gradients_that_cannot_be_written_to():
    run(give_what_cannot_be_written, 2)


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


@on_both_transports
def test_memory_that_is_given_on_one_rank(transport):
    run(give_on_one_rank, 2, transport=transport, env=SMALL)


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


@on_both_transports
def test_a_bucket_that_moves_during_a_pass(transport):
    run(replace_during_a_pass, 2, transport=transport)


def join_early() -> None:
    """A rank that has joined counts as zeros."""
    x = nn.Parameter(torch.ones(200))
    flat = torch.zeros(200)
    x.grad = flat
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    for step in range(1 + hvd.rank()):
        flat.zero_()
        ((hvd.rank() + 1) * x.sum()).backward()
        expected = 1.5 if step == 0 else 2.0 / hvd.size()
        assert x.grad is flat
        assert torch.equal(flat, torch.full((200,), expected))
        optimizer.step()
    hvd.join()


@on_both_transports
def test_join_with_given_memory(transport):
    run(join_early, 2, transport=transport, env=SMALL)


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


def test_given_memory_is_let_go():
    run(let_memory_go, 2, env=SMALL)
