# SPDX-License-Identifier: Apache-2.0
"""The input pipeline on any accelerator, called as device_operations are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from device_operations import busy
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

import torch_ring as hvd
from torch_ring.data import MODES, DevicePrefetcher, InputPipeline, ShardedSampler
from torch_ring.metrics import Means


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


def nested_batch(index: int) -> dict[str, Any]:
    filled = torch.full((30_011,), float(index))
    return {
        "pair": Pair(filled, [filled.int(), filled.bool()]),
        "empty": torch.empty(0),
        "n": index,
    }


class Late(DevicePrefetcher):
    """Copies late: a reader that does not wait for the copy finds old values."""

    def to_device(self, batch: Any) -> Any:
        busy(str(self.device), 20)
        return super().to_device(batch)


def prefetch_batches(device: str) -> None:
    """The loop's stream waits for copies; copied memory is kept until that stream is done."""
    for pins in (False, True):
        batches = [nested_batch(index) for index in range(5)]
        if pins:
            batches = tree_map_only(Tensor, Tensor.pin_memory, batches)
        results = []
        for index, batch in enumerate(Late(batches, device)):
            assert type(batch["pair"]) is Pair
            assert (batch["pair"].left.device.type, batch["n"]) == (device, index)
            busy(device, 30)  # it is read later, when it is no longer ours
            sources = [batch["pair"].left, *batch["pair"].right, batch["empty"]]
            results.append([torch.empty_like(source).copy_(source) for source in sources])
            del batch, sources
        for index, (left, whole, flag, empty) in enumerate(results):
            assert (left.cpu() == index).all()
            assert (whole.cpu() == index).all()
            assert (flag.cpu() == bool(index)).all()
            assert empty.numel() == 0
        assert len(results) == len(Late(batches, device)) == 5
    stop_early(device)


def stop_early(device: str) -> None:
    assert list(DevicePrefetcher([], device)) == []
    assert [x.item() for x in DevicePrefetcher([torch.tensor(3)], device)] == [3]
    closed = []

    def batches() -> Iterator[Tensor]:
        try:
            yield from torch.arange(10.0)
        finally:
            closed.append(True)

    for batch in DevicePrefetcher(batches(), device):
        assert batch.device.type == device
        break
    assert closed


def feed_training(device: str) -> None:
    size = hvd.size()
    data = TensorDataset(torch.arange(21.0 * size - 1).reshape(-1, 1))
    for mode in MODES:
        loader = DataLoader(data, 2, sampler=ShardedSampler(data, drop_last=True))
        means = Means("loss", "never")
        pipeline = InputPipeline(loader, device, mode)
        weight = torch.zeros(1, device=device, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1e-3))
        seen = []

        def step(batch: list[Tensor]) -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = (weight - batch[0]).square().mean()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            return loss

        for batch in pipeline:
            assert batch[0].device.type == device
            seen += batch[0].flatten().tolist()
            means.update(torch.tensor(2, device=device), loss=step(batch))
        values = means.compute()
        assert values["loss"] > 0
        assert values["never"] != values["never"]
        assert len(seen) == 20
        assert len(set(seen)) == {"real": 20, "cached": 16, "synthetic": 2}[mode]
        report = pipeline.report(step, steps=2, rounds=2)
        assert hvd.allgather_object(str(report)) == [str(report)] * size


DATA: list[Callable[[str], None]] = [prefetch_batches, feed_training]
