# SPDX-License-Identifier: Apache-2.0
"""Int8Compressor: 8-bit integers with a scale for every few elements."""

from __future__ import annotations

from collections.abc import Generator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_ring.compression.stateful import ErrorFeedback, Gather, Request, State

__all__ = ["Int8Compressor"]

_LARGEST_CODE = 127


class Int8Compressor(ErrorFeedback):
    """Sends 8-bit integers, a scale for every `elements_per_scale` of them, and error feedback.

    A scale is the largest magnitude among its elements divided by 127; elements are rounded to its
    nearest multiple. Every rank gets the integers of all ranks and adds up their values in the
    order of ranks, so that no sum is rounded to 8 bits.

    Source: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding", NeurIPS 2017 (a scale for each few elements, by their maximum; their rounding is
    stochastic, which error feedback makes unnecessary).

    Args:
        elements_per_scale: elements that share a scale; fewer are more exact, but need more scales.

    Raises:
        ValueError: `elements_per_scale` is less than 1.
    """

    def __init__(self, elements_per_scale: int = 256) -> None:
        if elements_per_scale < 1:
            raise ValueError(f"elements_per_scale must be at least 1, not {elements_per_scale}")
        self.elements_per_scale = elements_per_scale

    def send(
        self,
        gradient: Tensor,
        state: State,  # noqa: ARG002
    ) -> Generator[Request, Any, tuple[Tensor, Tensor]]:
        """Send codes and scales, and add up those of all ranks."""
        mine = quantize(gradient, self.elements_per_scale)
        everyones = yield Gather(*mine)
        total = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
        for codes, scales in everyones:
            total = dequantize(codes, scales, gradient.shape).add_(total)
        return total.div_(len(everyones)), dequantize(*mine, gradient.shape)


def quantize(tensor: Tensor, elements_per_scale: int) -> tuple[Tensor, Tensor]:
    """Return int8 codes, a row for each scale (the last one padded), and a column of scales.

    A non-finite element makes its scale non-finite, and so the whole dequantized row.
    """
    width = min(elements_per_scale, tensor.numel())
    flat, missing = tensor.flatten(), -tensor.numel() % width
    rows = (pad(flat, (0, missing)) if missing else flat).view(-1, width)
    scales = rows.abs().amax(1, keepdim=True) / _LARGEST_CODE
    divisible = scales.isfinite() & (scales >= torch.finfo(scales.dtype).tiny)
    codes = (rows / scales.where(divisible, torch.inf)).round_().to(torch.int8)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the tensor given to `quantize`, each element to within half a scale."""
    values = codes.to(scales.dtype).mul_(scales)  # a product of two dtypes takes ten times as long
    return values.flatten()[: prod(shape)].view(shape)
