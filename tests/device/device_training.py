"""Training that must work on any accelerator, called as device_operations are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import device_double
import torch
from optimizer_writes import WRITES
from torch import Tensor, nn
from training import (
    assert_same_on_all_ranks,
    assert_same_weights,
    joined_batches,
    loss_of,
    make_model,
    part,
)

import torch_ring as hvd


def take_steps(model: nn.Module, device: str, **options: object) -> None:
    """Take five steps on this rank's parts of the batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    for step, batch in enumerate(joined_batches(5)):
        wrapped.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, part(batch).to(device)).backward()
        wrapped.step()


def train_like_one_process(device: str) -> None:
    """Train as one process on the joined batches does; 16-bit compression comes near it."""
    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for batch in joined_batches(5):
        optimizer.zero_grad()
        loss_of(alone, batch).backward()
        optimizer.step()
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        model = make_model(seed=1 + hvd.rank()).to(device)
        model.load_state_dict(make_model(1).state_dict() if hvd.rank() == 0 else model.state_dict())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        take_steps(model, device, compression=compression)
        assert_same_on_all_ranks(*(p.cpu() for p in model.parameters()))
        if compression is hvd.Compression.none:
            assert_same_weights(copy.deepcopy(model).cpu(), alone)
        else:
            for weight, other in zip(model.parameters(), alone.parameters(), strict=True):
                assert (weight.cpu() - other).abs().max() < 0.05


class HalfOnHost(nn.Module):
    """A model whose first layer is on the host and whose others are on the device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        first, *others = make_model(1)
        self.first, self.others = first, nn.Sequential(*others).to(device)
        self.device = device

    def forward(self, batch: Tensor) -> Tensor:
        return self.others(self.first(batch.cpu()).to(self.device))


def train_half_on_the_host(device: str) -> None:
    model, alone = HalfOnHost(device), make_model(1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for batch in joined_batches(5):
        optimizer.zero_grad()
        loss_of(alone, batch).backward()
        optimizer.step()
    take_steps(model, device)
    devices = {weight.grad.device.type for weight in model.parameters() if weight.grad is not None}
    assert devices == {"cpu", device}
    assert_same_on_all_ranks(*(p.cpu() for p in model.parameters()))
    assert_same_weights(nn.Sequential(model.first, *model.others).cpu(), alone)


def train_with_stateful_compressors(device: str) -> None:
    """Check that the loss falls and the ranks stay equal, with error feedback on the device."""
    for compression in (hvd.Compression.int8(), hvd.Compression.powersgd()):
        model = make_model(1).to(device)
        before = [loss_of(model, batch.to(device)).item() for batch in joined_batches(5)]
        for _ in range(3):
            take_steps(model, device, compression=compression)
        after = [loss_of(model, batch.to(device)).item() for batch in joined_batches(5)]
        assert sum(after) < sum(before)
        assert_same_on_all_ranks(*(p.cpu() for p in model.parameters()))


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
    model = OnTwoStreams(device)
    alone = OnTwoStreams(device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for batch in joined_batches(5):
        optimizer.zero_grad()
        loss_of(alone, batch.to(device)).backward()
        optimizer.step()
    take_steps(model, device)
    assert_same_on_all_ranks(*(p.cpu() for p in model.parameters()))
    for weight, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(weight.cpu(), other.cpu(), rtol=1e-4, atol=1e-6)


def accumulate_and_broadcast_state(device: str) -> None:
    """Accumulate with op=Sum and a frozen parameter; then broadcast the state of the optimizer."""
    model = make_model().to(device)
    model[0].bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01 * (1 + hvd.rank())),
        model.named_parameters(),
        backward_passes_per_step=2,
        op=hvd.Sum,
    )
    for first, second in zip(joined_batches(4)[::2], joined_batches(4)[1::2], strict=True):
        optimizer.zero_grad()
        loss_of(model, part(first).to(device)).backward()
        loss_of(model, part(second).to(device)).backward()
        optimizer.synchronize()
        assert_same_on_all_ranks(
            *(p.grad if p.grad is None else p.grad.cpu() for p in model.parameters())
        )
        with optimizer.skip_synchronize():
            optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].device.type == device
    assert_same_on_all_ranks(state["exp_avg"].cpu(), state["step"])


def move_while_training(device: str) -> None:
    """Move the model to the device and back, before zero_grad() and after it."""
    alone, model = make_model(), make_model()
    move = device_double.move if device == device_double.DEVICE else nn.Module.to
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    places = ["cpu", "cpu", device, device, "cpu", device]
    for step, (batch, place) in enumerate(zip(joined_batches(6), places, strict=True)):
        reference.zero_grad()
        loss_of(alone, batch).backward()
        if step % 2 == 0:
            optimizer.zero_grad()
            move(model, place)
        else:
            move(model, place)
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
    """Each rank has its part's state on the device; results equal those without shard_state."""
    models = [make_model().to(device) for _ in range(2)]
    optimizers: list[Any] = [
        hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01), shard_state=is_sharded
        )
        for model, is_sharded in zip(models, (False, True), strict=True)
    ]
    for number, batch in enumerate(joined_batches(5)):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, part(batch).to(device)).backward()
            optimizer.step()
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs.cpu())
        expected, state = (optimizer.state_dict()["state"] for optimizer in optimizers)
        assert state.keys() == expected.keys()
        for index, values in expected.items():
            for key, value in values.items():
                assert state[index][key].device.type == "cpu"
                assert torch.equal(state[index][key], value.cpu())
        if number == 2:
            optimizers[1].load_state_dict(optimizers[1].state_dict())
        if number == 3:
            hvd.broadcast_optimizer_state(optimizers[1], hvd.size() - 1)


def write_to_sharded_state(device: str) -> None:
    """A program's writes to the state and the weights count as without shard_state."""
    kinds: dict[str, Callable[..., Any]] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    }
    for name, (kind, make_write) in WRITES.items():
        models = [make_model().to(device) for _ in range(2)]
        writes = [make_write() for _ in models]
        optimizers = [
            hvd.DistributedOptimizer(kinds[kind](model.parameters()), shard_state=is_sharded)
            for model, is_sharded in zip(models, (False, True), strict=True)
        ]
        for number, batch in enumerate(joined_batches(4)):
            for model, optimizer, write in zip(models, optimizers, writes, strict=True):
                optimizer.zero_grad()
                loss_of(model, part(batch).to(device)).backward()
                write(number, list(model.parameters()), optimizer)
                optimizer.step()
            for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
                assert torch.equal(ours.cpu(), theirs.cpu()), (name, number)


TRAINING: list[Callable[[str], None]] = [
    train_like_one_process,
    train_half_on_the_host,
    train_sharded,
    write_to_sharded_state,
    train_on_two_streams,
    accumulate_and_broadcast_state,
    move_while_training,
    train_with_stateful_compressors,
    check_sync_batch_norm,
]
