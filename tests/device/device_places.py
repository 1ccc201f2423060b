# SPDX-License-Identifier: Apache-2.0
"""Models on several devices, called as device_operations are.

A model on the CPU and one on the device train in one optimizer. One process drives one device: a
second one is refused on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from training import assert_same_on_all_ranks, joined_batches, loss_of, make_model, part

import torch_ring as hvd

REFUSAL = "one process drives one device"


def train_two_models(device: str) -> None:
    """Train a model on the host and one on the device, both in some passes, then one of them."""
    for compression in (hvd.Compression.none, hvd.Compression.bf16, hvd.Compression.int8()):
        models = {place: make_model(seed).to(place) for seed, place in enumerate(("cpu", device))}
        alone = {place: copy.deepcopy(model) for place, model in models.items()}
        optimizer = hvd.DistributedOptimizer(
            SGD([p for model in models.values() for p in model.parameters()], lr=0.1),
            compression=compression,
        )
        for step, batch in enumerate(joined_batches(8)):
            optimizer.zero_grad()
            places = [place for i, place in enumerate(models) if step < 5 or step % 3 != i]
            losses = [loss_of(models[place], part(batch).to(place)) for place in places]
            sum(loss.to(device) for loss in losses).backward()
            for place in places:
                alone[place].load_state_dict(models[place].state_dict())
                alone[place].zero_grad()
                loss_of(alone[place], batch.to(place)).backward()
                for mine, all_of_it in zip(
                    models[place].parameters(), alone[place].parameters(), strict=True
                ):
                    assert mine.grad is not None
                    assert mine.grad.device == mine.device
                    torch.testing.assert_close(
                        mine.grad,
                        all_of_it.grad,
                        rtol=1e-4,
                        atol=1e-6 if compression is hvd.Compression.none else 0.05,
                    )
                    assert_same_on_all_ranks(mine.grad.cpu())
            optimizer.step()


def parameter(device: str, index: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, device=f"{device}:{index}"))


def wrapped(*parameters: nn.Parameter) -> Any:
    return hvd.DistributedOptimizer(SGD(parameters, lr=0.1))


def refuse_a_second_device(device: str) -> None:
    """Refuse a model on it when it is wrapped, on all ranks, wherever it is; then go on."""
    if hvd.size() == 1 or torch.accelerator.device_count() < 2:
        return
    with pytest.raises(ValueError, match=f"{device}:0 and {device}:1, and {REFUSAL}"):
        wrapped(parameter(device, 0), parameter(device, 1))
    last = hvd.rank() + 1 == hvd.size()
    with pytest.raises(hvd.MismatchError, match=f"rank {hvd.size() - 1}: .*{REFUSAL}"):
        wrapped(parameter(device, 0), parameter(device, 1 if last else 0))
    optimizer = wrapped(first := parameter(device, 0))
    (first.sum() * hvd.rank()).backward()
    assert first.grad is not None
    assert first.grad.tolist() == [(hvd.size() - 1) / 2] * 3
    optimizer.step()
    with pytest.raises(ValueError, match=f"has used {device}:0, and the parameters are on"):
        wrapped(parameter(device, 1))
    with pytest.raises(ValueError, match=f"uses {device}:0, and the tensor is on {device}:1"):
        hvd.allreduce(torch.ones(3, device=f"{device}:1"))
    there = torch.ones(3, device=f"{device}:0")
    assert hvd.allreduce(there, op=hvd.Sum).tolist() == [hvd.size()] * 3


def use_the_second_device(device: str) -> None:
    """A process may drive a device other than the first, and wrap a model before it moves there."""
    if torch.accelerator.device_count() < 2:
        return
    model = make_model().to(f"{device}:0")
    optimizer = wrapped(*model.parameters())
    model.to(f"{device}:1")
    torch.accelerator.set_device_index(1)
    for batch in joined_batches(3):
        optimizer.zero_grad()
        loss_of(model, part(batch).to(f"{device}:1")).backward()
        optimizer.step()
    assert {p.grad.device.index for p in model.parameters() if p.grad is not None} == {1}
    assert_same_on_all_ranks(*(p.cpu() for p in model.parameters()))
    torch.accelerator.set_device_index(0)


def refuse_a_moved_model(device: str) -> None:
    """All ranks get an error when a rank's model moves to a device other than the used one."""
    if hvd.size() == 1 or torch.accelerator.device_count() < 2:
        return
    model, place = make_model().to(f"{device}:0"), f"{device}:0"
    optimizer = wrapped(*model.parameters())
    for step, batch in enumerate(joined_batches(3)):
        if step == 2 and hvd.rank() == hvd.size() - 1:
            place = f"{device}:1"
            model.to(place)
        told = pytest.raises(hvd.RingError, match=f"a model has moved: .*{REFUSAL}")
        with told if step == 2 else contextlib.nullcontext():
            if step == 2:
                hvd.barrier()  # all have done the steps before, which the error would end
            optimizer.zero_grad()
            loss_of(model, part(batch).to(place)).backward()
            optimizer.step()
            if step == 2:
                hvd.barrier()  # in a planned pass the others learn of it after their own step


PLACES: list[Callable[[str], None]] = [
    train_two_models,
    refuse_a_second_device,
    use_the_second_device,
    refuse_a_moved_model,
]
