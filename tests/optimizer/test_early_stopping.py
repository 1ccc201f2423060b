# SPDX-License-Identifier: Apache-2.0
"""Ranks that validate and decide: with one model and one decision."""

from __future__ import annotations

import pytest
import torch
from pool import run
from torch import nn
from training import take_step
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.metrics import Mean

EPOCHS = 6
PATIENCE = 2


def train_until_it_gets_worse() -> tuple[int, float, float]:
    """Train as README's steps do, and stop early; return epochs, the best loss, the rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    data = torch.Generator().manual_seed(hvd.rank())
    test = torch.Generator().manual_seed(9)
    inputs = torch.randn(64, 4, generator=test)
    best, bad = float("inf"), 0
    for epoch in range(EPOCHS):
        model.train()
        for _ in range(3):
            # Each rank has other data, so its running statistics differ from the others'.
            x = torch.randn(8, 4, generator=data) * (1 + 4 * hvd.rank())
            take_step(optimizer, nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)))
        hvd.broadcast_buffers(model)
        model.eval()
        loss = Mean()
        with torch.no_grad():
            own = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.update(own, len(inputs))
        value = loss.compute()
        plateau.step(value)
        bad = 0 if value < best else bad + 1
        best = min(best, value)
        # For example a time limit, which one rank reaches in epoch 3.
        is_late = hvd.rank() == 1 and epoch == 3
        if hvd.any_rank(is_late) or bad > PATIENCE:
            return epoch, best, optimizer.param_groups[0]["lr"]
    return EPOCHS, best, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("transport", "size"), [("shm", 3), ("tcp", 2)])
def test_ranks_decide_together(transport, size):
    results = run(train_until_it_gets_worse, size, transport=transport)
    assert results == [results[0]] * size
    assert results[0][0] <= 3


def ask() -> list[bool]:
    one, size = hvd.rank() == 1, hvd.size()
    found = [
        hvd.any_rank(False),
        hvd.any_rank(one),
        hvd.any_rank(torch.tensor([one])),
        hvd.any_rank(hvd.rank() < size),
        not hvd.any_rank(not one),
    ]
    pair = hvd.add_process_set([0, size - 1])
    if pair.included():
        found += [hvd.any_rank(hvd.rank() == size - 1, pair), hvd.any_rank(False, pair)]
    else:
        found += [True, False]
    hvd.remove_process_set(pair)
    if hvd.rank() == 1:  # it no longer votes
        hvd.join()
    else:
        found += [hvd.any_rank(False), hvd.any_rank(hvd.rank() == 0)]
        hvd.join()
    return found


@on_both_transports
def test_any_rank(transport):
    expected = [False, True, True, True, False, True, False]
    first, second, third = run(ask, 3, transport=transport)
    assert first == third == [*expected, False, True]
    assert second == expected
