# SPDX-License-Identifier: Apache-2.0
"""Compressor: the interface of compressors without a state; none, fp16 and bf16."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

__all__ = ["BF16Compressor", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor(Protocol):
    """The interface of a compressor without a state: two static methods, as in Horovod.

    A whole bucket of gradients is compressed at once: `tensor` is flat, and the compressed tensor
    is reduced element by element.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send instead of a tensor.

        Args:
            tensor: flat, of any dtype.

        Returns:
            The tensor to send, of any dtype, and the context for `decompress`.
        """

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the result of the reduction in its original form.

        Args:
            tensor: the sent tensors of all ranks, reduced element by element.
            ctx: the context that `compress` returned on this rank.

        Returns:
            A tensor with the shape and dtype of the one that was compressed.
        """


class NoneCompressor:
    """Sends tensors as they are."""

    wire_dtype: ClassVar[torch.dtype | None] = None

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """Return `tensor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:  # noqa: ARG004
        """Return `tensor`."""
        return tensor


class _CastCompressor:
    """Sends floating-point tensors in `wire_dtype`; sums and scaling are done in float32."""

    wire_dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return `tensor` in the wire dtype, and its dtype; only floating point is cast."""
        wire = tensor.to(cls.wire_dtype) if tensor.is_floating_point() else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return `tensor` in its original dtype, `ctx`."""
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """float16: half the bytes of float32, 11 bits of precision, numbers up to 65504."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16: half the bytes of float32, 8 bits of precision, the range of float32."""

    wire_dtype = torch.bfloat16
