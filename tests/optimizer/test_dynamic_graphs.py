"""Gradients that come and go: ranks that use different parameters, penalties, forks."""

import os

import pytest
import torch
from pool import FORKS, run
from torch.optim import SGD
from training import (
    grads,
    joined_batches,
    loss_of,
    make_model,
    part,
    weights,
)
from worlds import on_both_transports

import torch_ring as hvd


def use_different_parameters(set_to_none: bool, op: int) -> None:
    """Rank 0 uses a and b, rank 1 uses b and c, no rank d; then rank 0 a, rank 1 d."""
    a, b, c, d = parameters = weights(1, 1, 1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=op)
    share = 1 if op == hvd.Sum else 1 / 2
    for _ in range(3):  # the buckets are planned anew in the first
        optimizer.zero_grad()
        (2 * a + 4 * b if hvd.rank() == 0 else 8 * b + 16 * c).backward()
        assert grads(parameters) == [2 * share, 12 * share, 16 * share, None]
        optimizer.step()

    optimizer.zero_grad(set_to_none=set_to_none)
    (32 * d if hvd.rank() == 1 else 2 * a).backward()
    untouched = None if set_to_none else 0
    assert grads(parameters) == [2 * share, untouched, untouched, 32 * share]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_both_transports
def test_ranks_use_different_parameters(transport, set_to_none, op):
    run(use_different_parameters, 2, args=(set_to_none, op), transport=transport)


def leave_some_untouched(op: int) -> None:
    """An old gradient is not reduced again with its bucket."""
    parameters = weights(1, 1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=op)
    sum(parameters).backward()
    share = hvd.size() if op == hvd.Sum else 1
    assert grads(parameters) == [share] * 3
    optimizer.step()
    parameters[0].grad.zero_()
    parameters[2].grad.zero_()
    (parameters[0] * 2 + parameters[2] * 4).backward()
    assert grads(parameters) == [2 * share, share, 4 * share]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_untouched_gradients_stay(op):
    run(leave_some_untouched, 3, args=(op,))


def penalise_gradients() -> None:
    """A penalty made of p.grad would be a constant: it is refused before the pass sends data."""
    alone, together = make_model().double(), make_model().double()
    plain = SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        SGD(together.parameters(), lr=0.1), together.named_parameters()
    )
    for batch in joined_batches(steps=3):
        rows = part(batch).double()
        loss = together(rows).sum(1).mean()  # the last layer's gradients have no graph
        with pytest.raises(RuntimeError, match=r"create_graph.*'\d.*' would lose its graph"):
            (loss + together(rows).square().mean()).backward(create_graph=True)
        for model, chosen, x in ((alone, plain, batch.double()), (together, optimizer, rows)):
            chosen.zero_grad()
            x.requires_grad_()
            loss = loss_of(model, x)
            (of_rows,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            if model is together:
                gradients = hvd.grouped_allreduce(gradients)
            penalty = of_rows.square().sum(1).mean() + sum(g.square().sum() for g in gradients)
            (loss + penalty).backward()
            chosen.step()
        for mine, right in zip(together.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)
    optimizer.zero_grad()
    x, one = weights(3, 1)
    optimizer = hvd.DistributedOptimizer(SGD([x, one], lr=0.0))
    ((hvd.rank() + 1) * (2 * x + one)).sum().backward(create_graph=True)  # no graph is lost
    assert grads([x, one]) == [3, 1.5]


@on_both_transports
def test_penalties_made_of_gradients(transport):
    run(penalise_gradients, 2, transport=transport, env={"TORCH_RING_BUCKET_BYTES": "256"})


def train_after(event: str) -> None:
    """The hooks of a deleted optimizer, or of a parent process, do nothing."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    (x * (hvd.rank() + 1)).backward()
    assert x.grad.item() == 1.5
    if event == "fork":
        child = os.fork()
        if child == 0:
            x.grad = None
            (8 * x).backward()
            os._exit(0 if x.grad.item() == 8 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert x.grad.item() == 1.5, "the child has not written into our bucket"
    else:
        del optimizer
        x.grad = None
        (x * (hvd.rank() + 1)).backward()
        assert x.grad.item() == hvd.rank() + 1


@pytest.mark.parametrize("event", ["fork", "del"])
def test_hooks_do_nothing_in_a_child_and_without_their_optimizer(event):
    run(train_after, 2, args=(event,), kind=FORKS)
