# SPDX-License-Identifier: Apache-2.0
"""Training that must work on any accelerator, called as device_operations are.

The programs of tests/model run on accelerators, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import device_double
import torch
from torch import Tensor, nn
from training import (
    assert_same_on_all_ranks,
    assert_same_weights,
    joined_batches,
    loss_of,
    make_model,
    part,
    train,
)

import torch_ring as hvd


def check_sync_batch_norm(device: str) -> None:
    """Compare SyncBatchNorm on batches of different sizes with one process on the joined batch."""
    size, rank = hvd.size(), hvd.rank()
    rows = [3 + 2 * r for r in range(size)]
    begin = sum(rows[:rank])
    joined = torch.randn(sum(rows), 3, 4, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(joined.shape, generator=torch.Generator().manual_seed(2))
    alone, whole = nn.BatchNorm1d(3), joined.clone().requires_grad_()
    (alone(whole) * weight).sum().backward()
    sync = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3)).to(device)
    mine = joined[begin : begin + rows[rank]].to(device).requires_grad_()
    output = sync(mine)
    (output * weight[begin : begin + rows[rank]].to(device)).sum().backward()
    assert output.device.type == device
    assert whole.grad is not None
    assert mine.grad is not None
    wanted = whole.grad[begin : begin + rows[rank]]
    torch.testing.assert_close(mine.grad.cpu(), wanted, rtol=1e-4, atol=1e-5)
    if size > 1:  # alone it is torch's batch_norm, which leaves a stand-in without statistics
        torch.testing.assert_close(sync.running_mean.cpu(), alone.running_mean)
        torch.testing.assert_close(sync.running_var.cpu(), alone.running_var)


class OnTwoStreams(nn.Module):
    """Two branches whose forward and backward passes each run on a stream of their own."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.left, self.right = make_model(1).to(device), make_model(2).to(device)
        self.device = device

    def forward(self, batch: Tensor) -> Tensor:
        main = torch.accelerator.current_stream()
        outputs = []
        for branch in (self.left, self.right):
            stream = torch.Stream(self.device)
            stream.wait_stream(main)
            with stream:
                outputs.append(branch(batch))
            main.wait_stream(stream)
        return outputs[0] + outputs[1]


def train_on_two_streams(device: str) -> None:
    model, alone = OnTwoStreams(device), OnTwoStreams(device)
    batches = [batch.to(device) for batch in joined_batches(5)]
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, hvd.DistributedOptimizer(optimizer), map(part, batches))
    assert_same_on_all_ranks(*(p.cpu() for p in model.parameters()))
    for weight, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(weight.cpu(), other.cpu(), rtol=1e-4, atol=1e-6)


def move_while_training(device: str) -> None:
    """Move the model to the device and back, before zero_grad() and after it."""
    alone, model = make_model(), make_model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    places = ["cpu", "cpu", *[device] * 4, "cpu", *[device] * 4]  # where passes are planned
    for step, (batch, place) in enumerate(zip(joined_batches(11), places, strict=True)):
        reference.zero_grad()
        loss_of(alone, batch).backward()
        if step % 2 == 0:
            optimizer.zero_grad()
            device_double.move(model, place)
        else:
            device_double.move(model, place)
            optimizer.zero_grad()
        loss_of(model, part(batch).to(place)).backward()
        for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            assert mine.grad.device == mine.device
            torch.testing.assert_close(mine.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-5)
        reference.step()
        optimizer.step()
    assert_same_weights(copy.deepcopy(model).cpu(), alone)


def train_sharded(device: str) -> None:
    """Results equal those without shard_state; the whole state is on the host."""
    models = [make_model().to(device) for _ in range(2)]
    optimizers: list[Any] = []
    for model, is_sharded in zip(models, (False, True), strict=True):
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizers.append(hvd.DistributedOptimizer(adam, shard_state=is_sharded))
        train(model, optimizers[-1], [part(batch).to(device) for batch in joined_batches(5)])
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    expected, state = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for index, values in expected.items():
        for key, value in values.items():
            assert state[index][key].device.type == "cpu"
            assert torch.equal(state[index][key], value.cpu())
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    hvd.broadcast_optimizer_state(optimizers[1], hvd.size() - 1)
    train(models[1], optimizers[1], [part(joined_batches(1)[0]).to(device)])
    assert_same_on_all_ranks(*(weight.cpu() for weight in models[1].parameters()))


TRAINING: list[Callable[[str], None]] = [
    train_sharded,
    train_on_two_streams,
    move_while_training,
    check_sync_batch_norm,
]
