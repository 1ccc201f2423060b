"""Gradients on an accelerator before they enter buckets, called as device_operations are.

They wait outside until their bucket is full, and a program may change them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from many_parameters import NUMEL, backward, make_parameters, zero_loss
from torch import Tensor, nn

import torch_ring as hvd


def wrap(parameters: list[nn.Parameter], **options: object) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)


def means(value: float) -> float:
    """Return the mean over the ranks of value * (rank + 1)."""
    return value * (hvd.size() + 1) / 2


def is_filled(tensor: Tensor | None, value: float) -> bool:
    return tensor is not None and bool(tensor.eq(value).all())


def keep_gradients(device: str) -> None:
    """Gradients that the program keeps, of one parameter or of all, keep their values."""
    for kept_ones in (slice(1, 2), slice(None)):
        parameters = make_parameters(device, 4)
        optimizer = wrap(parameters)
        kept: list[list[Tensor | None]] = []
        for step in range(1, 5):
            optimizer.zero_grad()
            backward(parameters, step * (hvd.rank() + 1.0))
            assert all(is_filled(p.grad, means(step)) for p in parameters)
            kept.append([p.grad for p in parameters[kept_ones]])
        for step, gradients in enumerate(kept, 1):
            assert all(is_filled(gradient, means(step)) for gradient in gradients)


def accumulate_gradients(device: str) -> None:
    """Accumulate over passes, whether zero_grad() drops the gradients or not, and in no_sync()."""
    parameters = make_parameters(device, 5)
    optimizer = wrap(parameters, backward_passes_per_step=3)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step != 2)
        for value in (1, 2, 3):
            backward(parameters, value * (hvd.rank() + 1.0))
        assert all(is_filled(p.grad, means(6)) for p in parameters)
        optimizer.step()

    parameters = make_parameters(device, 5)
    optimizer = wrap(parameters)
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward(parameters, hvd.rank() + 1.0)
            assert all(is_filled(p.grad, hvd.rank() + 1.0) for p in parameters)
        backward(parameters[1:], 2 * (hvd.rank() + 1.0))  # the first waits for step()
        assert is_filled(parameters[1].grad, means(3))
        optimizer.step()
        assert is_filled(parameters[0].grad, means(1))


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


def differentiate_gradients(device: str) -> None:
    """A gradient with a graph is refused, and training goes on."""
    weights = [nn.Parameter(torch.full((3,), float(k), device=device)) for k in (1, 2)]
    optimizer = wrap(weights)
    for _ in range(3):
        optimizer.zero_grad()
        loss = sum((weight * weight * (hvd.rank() + 1.0)).sum() for weight in weights)
        assert isinstance(loss, Tensor)
        if hvd.size() > 1:
            with pytest.raises(RuntimeError, match="would lose its graph"):
                loss.backward(create_graph=True)
            optimizer.zero_grad()
        loss.backward()
        for k, weight in enumerate(weights, 1):
            assert is_filled(weight.grad, means(2 * k))


def give_gradients(device: str) -> None:
    """A gradient in memory of the program stays there, and gets the average."""
    for options in ({}, {"run_ahead": False}, {"op": hvd.Sum}, {"backward_passes_per_step": 2}):
        parameters = make_parameters(device, 4)
        flat = torch.zeros(4 * NUMEL, device=device)
        given = list(flat.split(NUMEL))
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient
        optimizer = wrap(parameters, **options)
        passes = optimizer.backward_passes_per_step if hvd.size() > 1 else 1
        share = 1 if options.get("op") != hvd.Sum else hvd.size()
        for step in range(1, 9):
            flat.zero_()
            mine = parameters[1:] if step == 6 and hvd.rank() == 1 else parameters
            for _ in range(passes):
                backward(mine, step * (hvd.rank() + 1.0))
            first = means(step) - (2 * step / hvd.size() if step == 6 and hvd.size() > 1 else 0)
            for parameter, gradient in zip(parameters, given, strict=True):
                assert parameter.grad is gradient
                value = first if gradient is given[0] else means(step)
                expected = torch.full((NUMEL,), value * share * passes)
                torch.testing.assert_close(gradient.cpu(), expected)
            optimizer.step()


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


def leave_gradients_out(device: str) -> None:
    """A gradient of only some ranks is averaged with zeros; one of no rank stays None."""
    parameters = make_parameters(device, 6)
    optimizer = wrap(parameters)
    for step in range(4):
        optimizer.zero_grad()
        mine = parameters[:3] if hvd.rank() == 0 else parameters[2:5]
        backward(mine, hvd.rank() + 1.0)
        rest = means(1) - 1 / hvd.size()  # the mean without rank 0's
        expected = [1 / hvd.size()] * 2 + [means(1)] + [rest] * 2
        for parameter, value in zip(parameters[:5], expected, strict=True):
            if hvd.size() == 1 and value == 0:
                continue
            assert parameter.grad is not None, step
            torch.testing.assert_close(parameter.grad.cpu(), torch.full(parameter.shape, value))
        assert parameters[5].grad is None


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
    keep_gradients,
    accumulate_gradients,
    replace_gradients,
    differentiate_gradients,
    give_gradients,
    lay_out_gradients,
    leave_gradients_out,
    name_the_culprit,
    name_the_culprit_alone,
]
