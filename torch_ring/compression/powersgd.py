"""The stateful compressors to choose from: 8-bit integers and low-rank matrices."""

from __future__ import annotations

from collections.abc import Generator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_ring.stateful import ErrorFeedback, Gather, Reduce, Request, State

__all__ = ["Int8Compressor", "PowerSGDCompressor"]

_LARGEST_CODE = 127


class Int8Compressor(ErrorFeedback):
    """Sends 8-bit integers, with a scale for every so many elements, and error feedback.

    A scale is the largest magnitude among its elements over 127; elements are rounded to the
    nearest multiple of it. Every rank gets all integers and adds up what they stand for in the
    order of ranks, so that no sum is rounded to 8 bits.

    Source: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding", NeurIPS 2017 (a scale for each few elements, by their maximum; their rounding is
    stochastic, which error feedback makes unnecessary).

    Args:
        elements_per_scale: fewer are more exact, and cost more scales.
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
        """See `ErrorFeedback`."""
        mine = quantize(gradient, self.elements_per_scale)
        everyones = yield Gather(*mine)
        total = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
        for codes, scales in everyones:
            total = dequantize(codes, scales, gradient.shape).add_(total)
        return total.div_(len(everyones)), dequantize(*mine, gradient.shape)


def quantize(tensor: Tensor, elements_per_scale: int) -> tuple[Tensor, Tensor]:
    """Return int8 codes, a row for each scale (the last one filled up), and a column of scales.

    An element that is not finite makes its scale so, and what is made of it again.
    """
    width = min(elements_per_scale, tensor.numel())
    flat, missing = tensor.flatten(), -tensor.numel() % width
    rows = (pad(flat, (0, missing)) if missing else flat).view(-1, width)
    scales = rows.abs().amax(1, keepdim=True) / _LARGEST_CODE
    divisible = scales.isfinite() & (scales >= torch.finfo(scales.dtype).tiny)
    codes = (rows / scales.where(divisible, torch.inf)).round_().to(torch.int8)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the tensor that `quantize` has been given, up to half a scale."""
    values = codes.to(scales.dtype).mul_(scales)  # a product of two dtypes takes ten times as long
    return values.flatten()[: prod(shape)].view(shape)


class PowerSGDCompressor(ErrorFeedback):
    """Sends gradients as products of two thin matrices, with error feedback.

    A gradient is a matrix with the rows of the parameter's first dimension. One step of the power
    iteration, which goes on from where the last one of this parameter ended, finds the space of
    its `rank` largest directions; what lies in it is sent. A tensor for which the two matrices
    would have as many elements as itself is sent whole: all vectors are.

    The two products are the machine's own: ranks with unlike processors or numbers of threads
    may differ in the last bits of the result.

    Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization", NeurIPS 2019, algorithms 1 and 2.

    Args:
        rank: columns of the two matrices.
        seed: of the first right matrix.
    """

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"the rank must be at least 1, not {rank}")
        self.rank = rank
        self.seed = seed

    def reduce(self, gradient: Tensor, state: State) -> Generator[Request, Any, Tensor]:
        """See `StatefulCompressor`."""
        if self._pays(gradient.shape):
            return (yield from super().reduce(gradient, state))
        return (yield Reduce(gradient))  # type: ignore[no-any-return]

    def send(
        self, gradient: Tensor, state: State
    ) -> Generator[Request, Any, tuple[Tensor, Tensor]]:
        """See `ErrorFeedback`."""
        matrix = gradient.flatten(1)
        right = state["right"] if "right" in state else self._first_right(matrix)
        left = torch.linalg.qr((yield Reduce(matrix @ right))).Q
        own_right = matrix.T @ left
        right = yield Reduce(own_right)
        state["right"] = right
        # The mean over ranks of left @ own_right.T: `left` is the same on all of them.
        mean = left @ right.T
        sent = left @ own_right.T
        return mean.view_as(gradient), sent.view_as(gradient)

    def _pays(self, shape: torch.Size) -> bool:
        if len(shape) < 2:
            return False
        rows, columns = shape[0], prod(shape[1:])
        return self.rank * (rows + columns) < rows * columns

    def _first_right(self, matrix: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        right = torch.randn(matrix.shape[1], self.rank, generator=generator)
        return right.to(matrix)
