# SPDX-License-Identifier: Apache-2.0
"""Gradients that come and go: other parameters on other ranks, graphs, quantised weights."""

import pytest
import torch
from pool import run
from torch.optim import SGD
from training import (
    assert_same_on_all_ranks,
    grads,
    joined_batches,
    loss_of,
    make_model,
    part,
    take_step,
    weights,
)
from worlds import on_both_transports
from zoo import FEATURES, Quantised

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


def refuse_a_graph() -> None:
    """A penalty made of p.grad would be a constant: it is refused before the pass sends data."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    for batch in joined_batches(steps=3):
        rows = part(batch)
        loss = model(rows).sum(1).mean()  # the last layer's gradients have no graph
        with pytest.raises(RuntimeError, match=r"create_graph.*'\d.*' would lose its graph"):
            (loss + model(rows).square().mean()).backward(create_graph=True)
        take_step(optimizer, loss_of(model, rows))
    assert_same_on_all_ranks(*model.parameters())
    x, one = weights(3, 1)
    optimizer = hvd.DistributedOptimizer(SGD([x, one], lr=0.0))
    ((hvd.rank() + 1) * (2 * x + one)).sum().backward(create_graph=True)  # no graph is lost
    assert grads([x, one]) == [3, 1.5]


def thaw_quantised_weights() -> None:
    """Frozen parameters whose dtypes have no gradients are refused once they are unfrozen."""
    model = Quantised()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.01))
    model(torch.ones(1, FEATURES, dtype=torch.float64)).sum().backward()
    optimizer.step()
    model.low.requires_grad_(True)
    with pytest.raises(ValueError, match=r"requires a gradient now.*float8_e4m3fn"):
        optimizer.step()


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (use_different_parameters, (True, hvd.Average)),
        (use_different_parameters, (False, hvd.Sum)),
        (refuse_a_graph, ()),
        (thaw_quantised_weights, ()),
    ],
)
@on_both_transports
def test_gradients_that_come_and_go(transport, check, args):
    run(check, 2, args=args, transport=transport, env={"TORCH_RING_BUCKET_BYTES": "256"})
