# SPDX-License-Identifier: Apache-2.0
"""Every collective by its definition: the inputs of all ranks, and the result on each of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_ring as hvd

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NUMBERS = [*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
MOVED_ONLY = [torch.uint16, torch.uint32, torch.uint64, torch.complex32, *FLOAT8]
MOVED = [*NUMBERS, torch.bool, *COMPLEX, *MOVED_ONLY]
SHAPES: list[tuple[int, ...]] = [
    *((), (0,), (1,), (3,), (5, 0, 2), (7, 11), (4099,)),  # inline, and gathered
    *((129, 97), (300_007,)),  # and in chunks
]
BITWISE = {
    hvd.Band: torch.bitwise_and,
    hvd.Bor: torch.bitwise_or,
    hvd.Bxor: torch.bitwise_xor,
}


def shapes_of(dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Return the shapes to test with a dtype: all of them only with some."""
    is_common = dtype in (torch.float32, torch.bfloat16, torch.int32)
    return SHAPES if is_common else [(), (0,), (7, 11), (4099,)]


def repeated(period: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a shape that has these elements again and again."""
    count = torch.Size(shape).numel()
    return period.repeat(count // len(period) + 1)[:count].reshape(shape)


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> Tensor:
    """Return small numbers of a rank, so that results of four ranks are exact."""
    numbers = torch.arange(5, device="cpu") * size + rank
    numbers = numbers % (3 if dtype in (torch.int8, torch.uint8) else 8)
    if dtype != torch.uint8:
        numbers = numbers - (1 if dtype == torch.int8 else 3)
    numbers = numbers.to(dtype)
    return repeated(numbers * (1 + 2j) if dtype.is_complex else numbers, shape)


def patterned(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return a tensor whose bytes differ by rank and by place, including NaNs of all kinds."""
    period = 2 if dtype == torch.bool else 251
    octets = (torch.arange(period, device="cpu") * 7 + 31 * rank) % period
    count = torch.Size(shape).numel() * dtype.itemsize
    return repeated(octets.to(torch.uint8), (count,)).view(dtype).view(shape).to(device)


def wide_integers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return integers of the whole range of the dtype, including its ends."""
    numbers = patterned(rank, shape, dtype, "cpu")
    ends = torch.iinfo(dtype)
    for at, value in enumerate([ends.min, ends.max, ends.max - rank, ends.min + rank]):
        numbers.view(-1)[at : at + 1] = value
    return numbers


def stacked_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the small numbers of all ranks, one after the other in dimension 0."""
    size = hvd.size()
    return torch.stack([tensor_of(r, shape, dtype, size) for r in range(size)])


def bits(tensor: Tensor) -> Tensor:
    plain = tensor.cpu().resolve_conj().resolve_neg()
    # Of a single element, contiguous() would keep a stride that view() refuses.
    plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8)


def same(got: Tensor, want: Tensor) -> bool:
    is_alike = (got.dtype, got.shape) == (want.dtype, want.shape)
    return is_alike and torch.equal(bits(got), bits(want))


def reduced(stack: Tensor, op: int) -> Tensor:
    """Return the reduction over dimension 0, in the dtype of the stack."""
    if op in BITWISE:
        return functools.reduce(BITWISE[op], stack)
    if stack.is_complex():  # torch divides complex numbers less exactly than real ones
        return torch.view_as_complex(reduced(torch.view_as_real(stack), op))
    wide = stack.double() if stack.is_floating_point() else stack.long()
    reductions: dict[int, Callable[[], Tensor]] = {
        hvd.Sum: lambda: wide.sum(0),
        hvd.Average: lambda: average(stack),
        hvd.Min: lambda: wide.amin(0),
        hvd.Max: lambda: wide.amax(0),
        hvd.Product: lambda: wide.prod(0),
    }
    return reductions[op]().to(stack.dtype)


def average(stack: Tensor) -> Tensor:
    """Return the mean over dimension 0; of integers truncated, with a sum that does not wrap."""
    size = len(stack)
    if stack.is_floating_point():
        return stack.sum(0) / size
    quotients = torch.div(stack.long(), size, rounding_mode="floor")
    rests = (stack.long() - quotients * size).sum(0)
    floor = quotients.sum(0) + rests // size
    return floor + ((floor < 0) & (rests % size != 0))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts, as torch.cat() does with the dtypes that it takes."""
    dtype = parts[0].dtype
    if dtype not in MOVED_ONLY:
        return torch.cat(list(parts))
    rows = sum(len(part) for part in parts)
    return torch.cat([bits(part) for part in parts]).view(dtype).view(rows, *parts[0].shape[1:])


# --- the collectives

Parts = Sequence[Tensor]


@dataclass(frozen=True)
class Collective:
    """A function of horovod.torch.

    Attributes:
        name: the function; its forms do the same in place, asynchronously, and with a group.
        dtypes: all that it takes.
        result: of the inputs of all members, on one of them (the n-th).
        arguments: of the call, by the members' ranks, which of them calls, and the first
            dimension of the shape.
        rows: the first dimension of a member's input, by the same.
        factor: of the gradient, by the number of members: torch's, through `result`, is this part
            of Horovod's. None: it has no derivative.
    """

    name: str
    dtypes: Sequence[torch.dtype]
    result: Callable[[Parts, int], Tensor]
    arguments: Callable[[Sequence[int], int, int], Mapping[str, Any]]
    rows: Callable[[int, int, int], int] = lambda size, index, first: first  # noqa: ARG005
    factor: Callable[[int], float] | None = None
    takes_scalars: bool = False

    @property
    def forms(self) -> list[str]:
        pattern = re.compile(rf"(grouped_)?{self.name}(_async)?_?")
        return [name for name in hvd.__all__ if pattern.fullmatch(name)]

    def parts(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return the inputs of all members."""
        return [self._part(size, index, shape, dtype) for index in range(size)]

    def _part(self, size: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        shape = (self.rows(size, index, shape[0]), *shape[1:]) if shape else shape
        op = self.arguments(range(size), index, 1).get("op")
        if op is None or op in BITWISE:
            return patterned(index, shape, dtype, "cpu")
        if op == hvd.Average and dtype in INTEGERS:
            return wide_integers(index, shape, dtype)
        return tensor_of(index, shape, dtype, size)

    def call(
        self,
        form: str,
        tensor: Tensor,
        first: int = 1,
        process_set: hvd.ProcessSet = hvd.global_process_set,
        **options: Any,
    ) -> Tensor:
        """Call a form of the function; a group has a copy of the tensor, whose result is equal."""
        arguments = self.arguments(process_set.ranks, process_set.rank(), first)
        is_group = form.startswith("grouped_")
        given = [tensor, tensor.clone()] if is_group else tensor
        got = getattr(hvd, form)(given, process_set=process_set, **arguments, **options)
        if "_async" in form:
            got = hvd.synchronize(got)
        if is_group:
            assert len(got) == 2
            assert same(*got)
        return got[0] if isinstance(got, list | tuple) else got


def _reduction(op: hvd.ReduceOp, dtypes: Sequence[torch.dtype]) -> Collective:
    return Collective(
        "allreduce",
        dtypes,
        lambda parts, _: reduced(torch.stack(list(parts)), op),
        lambda *_: {"op": op},
        factor=(lambda _: 1.0) if op in (hvd.Average, hvd.Sum) else None,
        takes_scalars=True,
    )


def _scattered(op: hvd.ReduceOp) -> Collective:
    return Collective(
        "reducescatter",
        [*NUMBERS, *COMPLEX],
        lambda parts, index: reduced(torch.stack(list(parts)), op).tensor_split(len(parts))[index],
        lambda *_: {"op": op},
        factor=float,
    )


def _broadcast(root: int) -> Collective:
    return Collective(
        "broadcast",
        MOVED,
        lambda parts, _: parts[root],
        lambda ranks, *_: {"root_rank": ranks[root]},
        factor=lambda size: 1 / size,
        takes_scalars=True,
    )


def _rows_from(size: int, source: int, first: int) -> list[int]:
    """Return for each member the number of rows that one of them sends it, by splits."""
    return [first * ((source + to + 1) % 3) for to in range(size)]


def _exchanged(parts: Parts, index: int) -> Tensor:
    """Return the rows for a member. Two rows of each are not sent."""
    first = (len(parts[0]) - 2) // sum(_rows_from(len(parts), 0, 1))
    rows = [_rows_from(len(parts), source, first) for source in range(len(parts))]
    return joined([part.split([*rows[i], 2])[index] for i, part in enumerate(parts)])


COLLECTIVES = [
    _reduction(hvd.Average, [*NUMBERS, *COMPLEX]),
    _reduction(hvd.Sum, [*NUMBERS, *COMPLEX]),
    *(_reduction(op, [*NUMBERS, torch.bool]) for op in (hvd.Min, hvd.Max, hvd.Product)),
    *(_reduction(op, [*INTEGERS, torch.bool]) for op in BITWISE),
    *(_scattered(op) for op in (hvd.Average, hvd.Sum)),
    *(_broadcast(root) for root in (0, -1)),
    Collective(
        "allgather",
        MOVED,
        lambda parts, _: joined(parts),
        lambda *_: {},
        rows=lambda size, index, first: first * ((index + 1) % 3),  # noqa: ARG005
        factor=lambda size: 1 / size,
    ),
    Collective(
        "alltoall",
        MOVED,
        lambda parts, index: joined([part.tensor_split(len(parts))[index] for part in parts]),
        lambda *_: {},
        rows=lambda size, index, first: size * first,  # noqa: ARG005
        factor=lambda _: 1.0,
    ),
    Collective(
        "alltoall",
        MOVED,
        _exchanged,
        lambda ranks, index, first: {"splits": _rows_from(len(ranks), index, first)},
        rows=lambda size, index, first: sum(_rows_from(size, index, first)) + 2,
        factor=lambda _: 1.0,
    ),
]


def every_call(tensor: Tensor) -> dict[str, Callable[..., Any]]:
    """Return by its name a call of every function of a collective, with a tensor of this kind."""
    calls = {}
    for each in COLLECTIVES:
        for form in each.forms:
            is_group = form.startswith("grouped_")
            given = [torch.zeros(tensor.shape, device="cpu"), tensor] if is_group else tensor
            root = (0,) if each.name == "broadcast" else ()
            calls[form] = functools.partial(getattr(hvd, form), given, *root)
    return calls
