"""Tensors of the ranks in closed form, and their reductions.

Element i on rank r is i * size + r, as far as the dtype holds it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import torch_ring as hvd

NUMBERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (5, 0, 2), (7, 11), (4099,), (300_007,)]


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> Tensor:
    """Return the tensor of a rank, with values so small that results of four ranks are exact."""
    numel = torch.Size(shape).numel()
    values = (torch.arange(numel) % 5) * size + rank
    return (values % (3 if dtype in (torch.int8, torch.uint8) else 8)).to(dtype).reshape(shape)


def stacked_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensors of all ranks, one after the other in dimension 0."""
    size = hvd.size()
    return torch.stack([tensor_of(r, shape, dtype, size) for r in range(size)])


def reduced(stack: Tensor, op: int) -> Tensor:
    """Return the reduction over dimension 0, in the dtype of the stack."""
    wide = stack.to(torch.float64)
    reductions: dict[int, Callable[[], Tensor]] = {
        hvd.Sum: lambda: wide.sum(0),
        hvd.Average: lambda: wide.sum(0) / len(stack),
        hvd.Min: lambda: wide.amin(0),
        hvd.Max: lambda: wide.amax(0),
        hvd.Product: lambda: wide.prod(0),
    }
    result = reductions[op]()
    return result.to(stack.dtype) if stack.is_floating_point() else result.trunc().to(stack.dtype)


def shapes_of(dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Return the shapes to test with a dtype; the one of many segments only with two dtypes."""
    return SHAPES if dtype in (torch.float32, torch.bfloat16) else SHAPES[:-1]
