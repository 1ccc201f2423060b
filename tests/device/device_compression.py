# SPDX-License-Identifier: Apache-2.0
"""Compressed training on any accelerator, called as device_operations are.

A compressor must not make the host wait for the device, and its state belongs there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from training import assert_same_on_all_ranks, joined_batches, loss_of, make_model, part, train

import torch_ring as hvd

STATEFUL: list[Callable[[], Any]] = [
    hvd.Compression.int8,
    lambda: hvd.Compression.int8(elements_per_scale=16),
    lambda: hvd.Compression.powersgd(rank=2),
]
CASTS = [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16]


@contextlib.contextmanager
def without_host_waits(device: str) -> Iterator[None]:
    """Fail if the host waits for the device in the block."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    before = torch.ops.ringdouble.host_waits()
    yield
    assert torch.ops.ringdouble.host_waits() == before


def wrapped(model: nn.Module, compression: Any) -> Optimizer:
    return hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        compression=compression,
    )


def compress_without_the_host(device: str) -> None:
    """From the third step on the host does not wait for the device, but once to compare weights."""
    for compression in [*CASTS, *(make() for make in STATEFUL)]:
        model = make_model().to(device)
        optimizer = wrapped(model, compression)
        batches = [part(batch).to(device) for batch in joined_batches(8)]
        for step, batch in enumerate(batches):
            may_wait = step in (0, 1, 5)  # the sixth pass sends the digest of step 1's weights
            with contextlib.nullcontext() if may_wait else without_host_waits(device):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                loss_of(model, batch).backward()
                optimizer.step()
        assert_same_on_all_ranks(*(weight.cpu() for weight in model.parameters()))


def compress_as_on_the_host(device: str) -> None:
    """Gradients and states equal the host's, even after non-finite results."""
    for make in STATEFUL:
        models = {place: make_model().to(place) for place in ("cpu", device)}
        compressors = {place: make() for place in models}
        optimizers = {place: wrapped(models[place], compressors[place]) for place in models}
        for step, batch in enumerate(joined_batches(7)):
            # Not finite in the first step, before there are states, and in two later ones.
            overflow = step in (0, 3, 4) and hvd.rank() == hvd.size() - 1
            for place, model in models.items():
                mine = part(batch).to(place)
                with without_host_waits(device) if step > 2 else contextlib.nullcontext():
                    optimizers[place].zero_grad()
                    loss = loss_of(model, mine)
                    (loss * torch.inf if overflow else loss).backward()
            for here, there in zip(
                models["cpu"].parameters(), models[device].parameters(), strict=True
            ):
                assert there.grad is not None
                assert there.grad.isfinite().all() == (step not in (0, 3, 4))
                scale = here.grad.abs().amax().item() / 127  # of int8: one code apart
                if step not in (0, 3, 4):
                    torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-4, atol=scale)
            assert_same_states(compressors["cpu"], compressors[device], device)


def assert_same_states(here: Any, there: Any, device: str) -> None:
    assert here.states.keys() == there.states.keys()
    for name, state in here.states.items():
        assert state.keys() == there.states[name].keys()
        for key, value in state.items():
            other = there.states[name][key]
            assert other.device.type == device
            assert other.isfinite().all()
            torch.testing.assert_close(other.cpu(), value, rtol=1e-3, atol=0.02)


def continue_with_a_state_of_the_host(device: str) -> None:
    """A state saved on the host continues on the device."""
    for make in STATEFUL:
        compressors, model = (make(), make()), make_model().to(device)
        copy = make_model().to(device)
        optimizer = wrapped(model, compressors[0])
        *batches, last = [part(batch).to(device) for batch in joined_batches(4)]
        train(model, optimizer, batches)
        copy.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
        states = compressors[0].state_dict().items()
        compressors[1].load_state_dict(
            {name: {key: value.cpu() for key, value in state.items()} for name, state in states}
        )
        for network, its in ((model, optimizer), (copy, wrapped(copy, compressors[1]))):
            its.zero_grad()
            loss_of(network, last).backward()
        for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        for state in compressors[1].states.values():
            assert {value.device.type for value in state.values()} <= {device}


COMPRESSION: list[Callable[[str], None]] = [
    compress_without_the_host,
    compress_as_on_the_host,
    continue_with_a_state_of_the_host,
]
