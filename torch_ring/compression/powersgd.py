# SPDX-License-Identifier: Apache-2.0
"""PowerSGDCompressor: gradients as products of two thin matrices."""

from __future__ import annotations

from collections.abc import Generator
from math import prod
from typing import Any

import torch
from torch import Tensor

from torch_ring.compression.stateful import ErrorFeedback, Reduce, Request, State

__all__ = ["PowerSGDCompressor"]


class PowerSGDCompressor(ErrorFeedback):
    """Sends gradients as products of two thin matrices, with error feedback.

    A gradient is a matrix whose rows are the parameter's first dimension. One step of the power
    iteration, which continues from the last one of this parameter, finds the space of its `rank`
    largest directions; the gradient's projection onto this space is sent. A vector is sent whole,
    and so is a tensor if the two matrices would have as many elements.

    Each rank computes the products itself: ranks with different processors or numbers of threads
    may differ in the last bits of the result.

    Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization", NeurIPS 2019, algorithms 1 and 2.

    Args:
        rank: the number of columns of the two matrices.
        seed: the seed of the first right matrix; the same on all ranks.

    Raises:
        ValueError: `rank` is less than 1.
    """

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"the rank must be at least 1, not {rank}")
        self.rank = rank
        self.seed = seed

    def reduce(self, gradient: Tensor, state: State) -> Generator[Request, Any, Tensor]:
        """Send a tensor whole if two thin matrices would have as many elements."""
        if self._pays(gradient.shape):
            return (yield from super().reduce(gradient, state))
        return (yield Reduce(gradient))  # type: ignore[no-any-return]

    def send(
        self, gradient: Tensor, state: State
    ) -> Generator[Request, Any, tuple[Tensor, Tensor]]:
        """Take one step of the power iteration, and send the projection."""
        matrix = gradient.flatten(1)
        if "right" in state:  # perhaps on another device, as an error may be
            right = state["right"].to(matrix.device, non_blocking=True)
        else:
            right = self._first_right(matrix)
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
        generator = torch.Generator("cpu").manual_seed(self.seed)
        shape = (matrix.shape[1], self.rank)
        right = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return right.to(matrix)
