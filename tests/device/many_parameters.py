# SPDX-License-Identifier: Apache-2.0
"""A model of many parameters, whose backward pass makes each gradient by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

PARAMETERS, NUMEL = 500, 4096  # 8 MB of gradients


class _Produce(torch.autograd.Function):
    """A loss of 0 whose gradient is `value` in every element of every parameter."""

    @staticmethod
    def forward(ctx: Any, value: float, *parameters: Tensor) -> Tensor:
        ctx.value = value
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.full_like(p, ctx.value) for p in ctx.saved_tensors)


def make_parameters(device: str, count: int = PARAMETERS) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(NUMEL, device=device)) for _ in range(count)]


def zero_loss(parameters: Sequence[Tensor], value: float = 1.0) -> Tensor:
    """Return a loss whose backward pass gives each parameter a gradient full of `value`."""
    loss: Tensor = _Produce.apply(value, *parameters)
    return loss


def backward(parameters: Sequence[Tensor], value: float = 1.0) -> None:
    """Give each parameter a gradient of `value` in every element."""
    zero_loss(parameters, value).backward()
