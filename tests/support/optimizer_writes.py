# SPDX-License-Identifier: Apache-2.0
"""Programs that write to parameters and to the state of an optimizer between steps.

Each takes the number of the step, before which it is called, the parameters and the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

import torch_ring as hvd

Parameters = Sequence[torch.nn.Parameter]


def clear(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    if number == 2:
        optimizer.state.clear()


def replace(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    if number == 2:
        optimizer.state = defaultdict(dict)


def pop(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    if number >= 2:
        optimizer.state.pop(parameters[2])


def zero(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    for state in optimizer.state.values() if number == 2 else ():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


def put_zeros(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    """Replace tensors by others of their shapes."""
    for state in optimizer.state.values() if number == 2 else ():
        for key, value in state.items():
            state[key] = torch.zeros_like(value)


def put_whole(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    """Replace the state of one parameter by tensors of its shape, and of others."""
    if number >= 2:
        parameter = parameters[2]
        keys = list(optimizer.state[parameter])
        generator = torch.Generator().manual_seed(number)
        like = torch.rand(parameter.shape, generator=generator).to(parameter.device)
        optimizer.state[parameter] = {
            key: torch.tensor(5.0) if key == "step" else like + place
            for place, key in enumerate(keys)
        }


def shift(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    """Put a tensor in place of another one, and zeros in its place."""
    for state in optimizer.state.values() if number == 2 else ():
        if "max_exp_avg_sq" in state:
            state["max_exp_avg_sq"] = state["exp_avg_sq"]
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])


def pop_key(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    for parameter in parameters if number == 2 else ():
        optimizer.state[parameter].pop("momentum_buffer", None)


def clamp(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    with torch.no_grad():
        parameters[2].clamp_(-0.05, 0.05)


def multiply(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.9)


def move(number: int, parameters: Parameters, optimizer: Optimizer) -> None:
    for parameter in parameters:
        parameter.data = parameter.data * 0.9


class Average:
    """Evaluates with an exponential average, as torch_ema does; the ranks restore in turn."""

    def __init__(self) -> None:
        self._shadow: list[Tensor] = []

    def __call__(self, number: int, parameters: Parameters, optimizer: Optimizer) -> None:
        if not self._shadow:
            self._shadow = [parameter.clone().detach() for parameter in parameters]
        with torch.no_grad():
            for shadow, parameter in zip(self._shadow, parameters, strict=True):
                shadow.sub_(0.1 * (shadow - parameter))
        for rank in range(hvd.size()):
            hvd.barrier()
            if rank == hvd.rank():
                stored = [parameter.clone() for parameter in parameters]
                for shadow, parameter in zip(self._shadow, parameters, strict=True):
                    parameter.data.copy_(shadow.data)
        hvd.barrier()
        for shadow, parameter in zip(self._shadow, parameters, strict=True):
            assert torch.equal(shadow, parameter)
        for rank in range(hvd.size()):
            hvd.barrier()
            if rank == hvd.rank():
                for kept, parameter in zip(stored, parameters, strict=True):
                    parameter.data.copy_(kept.data)


class AverageOnRoot(Average):
    """Rank 0 alone evaluates with the average."""

    def __call__(self, number: int, parameters: Parameters, optimizer: Optimizer) -> None:
        if hvd.rank() == 0:
            for parameter in parameters:
                kept = parameter.data.clone()
                parameter.data.zero_()
                assert not parameter.any()
                parameter.data.copy_(kept)
                kept, parameter.data = parameter.data, torch.ones_like(kept)
                parameter.data = kept.clone() if number % 2 else kept


class SharpnessAware:
    """The first step of SAM and the way back, without a second pass; both ways to write it."""

    def __call__(self, number: int, parameters: Parameters, optimizer: Optimizer) -> None:
        before = [parameter.data.clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=0.1)
        for old, parameter in zip(before, parameters, strict=True):
            if number % 2:
                parameter.data = old
            elif parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=0.1)


class Beside:
    """A plain optimizer steps two of the parameters, too, and one without shard_state all."""

    def __init__(self) -> None:
        self._others: list[Any] = []

    def __call__(self, number: int, parameters: Parameters, optimizer: Optimizer) -> None:
        if not self._others:
            wrapped = hvd.DistributedOptimizer(SGD(parameters, lr=0.1))
            self._others = [SGD(parameters[1:3], lr=0.1), wrapped]
        for other in self._others:
            other.step()


WRITES: dict[str, tuple[str, Callable[[], Any]]] = {
    **{
        f"{write.__name__} {maker}": (maker, lambda write=write: write)
        for write in (clear, replace, pop, zero, put_zeros, put_whole)
        for maker in ("sgd", "adam")
    },
    "pop_key sgd": ("sgd", lambda: pop_key),
    **{
        write.__name__: ("adam", lambda write=write: write)
        for write in (multiply, move, clamp, shift)
    },
    **{kind.__name__: ("adam", kind) for kind in (Average, AverageOnRoot, SharpnessAware, Beside)},
}
"""By name: the kind of optimizer, and a maker of what is called before each step."""
