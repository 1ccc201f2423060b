"""Compressors without a state: none, fp16 and bf16, and the interface for your own."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

__all__ = ["BF16Compressor", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor(Protocol):
    """The interface of a compressor without a state: two static methods, as in Horovod.

    A bucket of gradients is compressed at once: `tensor` is flat, and what `compress` returns is
    reduced element by element.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what to send instead of `tensor`, and what `decompress` needs to know."""

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor that the reduced `tensor` stands for."""


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
        """Return `tensor` in the wire dtype, and its dtype; other than floats stay as they are."""
        wire = tensor.to(cls.wire_dtype) if tensor.is_floating_point() else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return `tensor` in the dtype that it had before."""
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Half the bytes, 11 bits of precision, numbers up to 65504."""

    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Half the bytes, 8 bits of precision, the range of float32."""

    wire_dtype = torch.bfloat16
