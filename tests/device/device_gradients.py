# SPDX-License-Identifier: Apache-2.0
"""Gradients on an accelerator before they enter buckets, called as device_operations are.

They wait outside until their bucket is full, and a program may change them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from many_parameters import backward, make_parameters, zero_loss
from torch import Tensor, nn

import torch_ring as hvd


def wrap(parameters: list[nn.Parameter], **options: object) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)


def means(value: float) -> float:
    """Return the mean over the ranks of value * (rank + 1)."""
    return value * (hvd.size() + 1) / 2


def is_filled(tensor: Tensor | None, value: float) -> bool:
    return tensor is not None and bool(tensor.eq(value).all())


def replace_gradients(device: str) -> None:
    """A gradient that has arrived counts, even if `grad` is set before its bucket is full."""
    parameters = make_parameters(device, 4)
    optimizer = wrap(parameters)

    arrived: list[Tensor] = []

    def replace_others(parameter: Tensor) -> None:
        for other in arrived:
            other.grad = torch.full_like(other, 7.0)
        arrived.append(parameter)

    if hvd.size() > 1:  # a single rank does not restore the gradients
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(replace_others)
    for _ in range(4):
        optimizer.zero_grad()
        arrived.clear()
        backward(parameters, hvd.rank() + 1.0)
        assert all(is_filled(p.grad, means(1)) for p in parameters)


def lay_out_gradients(device: str) -> None:
    """Gradients of other layouts than their parameters, and of complex numbers."""
    shapes = [(4, 1, 3, 3), (2, 6, 3, 3), (5, 7), (1, 8)]
    weights = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    weights[0].data = weights[0].data.to(memory_format=torch.channels_last)
    weights[1].data = weights[1].data.to(memory_format=torch.channels_last)
    weights.append(nn.Parameter(torch.zeros(6, dtype=torch.complex64, device=device)))
    optimizer = wrap(weights)
    values = [torch.arange(float(w.numel())).reshape(w.shape).to(w.dtype) for w in weights]
    transposed = values[2].t().contiguous().t()
    for _ in range(3):
        optimizer.zero_grad()
        for index, weight in enumerate(weights):
            weight.grad = None
            value = transposed if index == 2 else values[index]
            value = value.to(device) * (hvd.rank() + 1)
            weight.grad = value if index != 3 else value.t().clone().t()
        optimizer.synchronize()
        for weight, value in zip(weights, values, strict=True):
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad.cpu(), value * means(1))
        with optimizer.skip_synchronize():
            optimizer.step()


def name_the_culprit(device: str) -> None:
    """A non-finite gradient is named before the step, in buckets that are sent early."""
    for dtype in (torch.float32, torch.float16, torch.complex64):
        parameters = [nn.Parameter(p.detach().to(dtype)) for p in make_parameters(device, 6)]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
        sgd = torch.optim.SGD(parameters, lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, named, nan_check=True)
        last = hvd.size() - 1
        for step in range(1, 6):
            optimizer.zero_grad()
            values = [1.0] * 6
            if step % 2 == 0 and hvd.rank() == last:
                values[4], values[1] = float("nan" if step == 2 else "inf"), float("inf")
            pairs = zip(parameters, values, strict=True)
            loss = torch.stack([zero_loss([parameter], value) for parameter, value in pairs]).sum()
            loss.real.backward()
            if step % 2:
                optimizer.step()
                continue
            with pytest.raises(hvd.NonFiniteGradientError) as raised:
                optimizer.step()
            # Autograd goes from the last term to the first.
            has = "a NaN" if step == 2 else "an infinity"
            name = f"rank {last}: the gradient of 'p4' has {has}, step {step // 2 + 1} (1 other"
            assert str(raised.value).startswith(name), raised.value
            assert all(bool(p.isfinite().all()) for p in parameters)


def name_the_culprit_alone(device: str) -> None:
    """Gradients are checked before they are sent: the sum has the infinity on all ranks."""
    parameters = make_parameters(device, 2)
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    sgd = torch.optim.SGD(parameters, lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, named, nan_check=True)

    def wait_for_the_bucket(_: torch.Tensor) -> None:
        # It was sent when p0's gradient came. Collectives of a communicator run one after another.
        assert hvd.allreduce(torch.ones(1, device=device), name="after the bucket").item() == 1

    (other,) = make_parameters(device, 1)  # of no optimizer
    other.register_hook(wait_for_the_bucket)
    last = hvd.size() - 1
    for step in range(1, 5):
        optimizer.zero_grad()
        value = float("inf") if step % 2 == 0 and hvd.rank() == last else 1.0
        # Autograd goes from the last term to the first.
        loss = zero_loss([other]) + zero_loss(parameters[:1]) + zero_loss(parameters[1:], value)
        loss.backward()
        if step % 2:
            optimizer.step()
            continue
        with pytest.raises(hvd.NonFiniteGradientError) as raised:
            optimizer.step()
        name = f"rank {last}: the gradient of 'p1' has an infinity, step {step // 2 + 1}"
        assert str(raised.value).startswith(name), raised.value


GRADIENTS: list[Callable[[str], None]] = [
    replace_gradients,
    lay_out_gradients,
    name_the_culprit,
    name_the_culprit_alone,
]
