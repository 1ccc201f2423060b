"""Every dtype that docs/torch-distributed.md calls tested, with every operator, and in moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtype_checks import COMPLEX, FLOAT8, INTEGERS, MOVED, patterned
from dtype_checks import same as same_bits
from torch import Tensor

from tests.support.groups import on_ring
from tests.support.pool import error_of
from tests.support.worlds import on_both_transports

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SUMS = [*INTEGERS, *FLOATS, *COMPLEX]
ORDERED = [*INTEGERS, *FLOATS, torch.bool]
BITS = [*INTEGERS, torch.bool]
SHAPES: list[tuple[int, ...]] = [(), (0,), (5,), (4099,)]
Op = dist.ReduceOp


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return small whole numbers that identify rank and element, some of them negative."""
    numbers = (torch.arange(int(torch.Size(shape).numel())) * 3 + rank * 5) % 11
    if dtype == torch.bool:
        numbers = numbers % 2
    elif dtype != torch.uint8:
        numbers = numbers - 5
    if dtype.is_complex:
        return (numbers * (1 + 2j)).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def everyone(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the values of all ranks, one after the other in dimension 0."""
    return torch.stack([values(rank, shape, dtype) for rank in range(dist.get_world_size())])


def mean(stack: Tensor) -> Tensor:
    """Return the mean; of integers, without the fraction."""
    if stack.is_complex():  # torch divides complex numbers less exactly than real ones
        return torch.view_as_complex(mean(torch.view_as_real(stack)))
    total = stack.sum(0)
    if stack.is_floating_point():
        return total / len(stack)
    return torch.div(total, len(stack), rounding_mode="trunc")


def halves(stack: Tensor) -> Tensor:
    """Return the sum of halves; of integers, each half without the fraction."""
    if stack.is_floating_point() or stack.is_complex():
        return (stack * 0.5).sum(0)
    return torch.div(stack, 2, rounding_mode="trunc").sum(0)


def doublings(stack: Tensor) -> Tensor:
    """Return the sum with weights that double from rank to rank."""
    return torch.stack([values * 2**rank for rank, values in enumerate(stack)]).sum(0)


def bitwise(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def combined(stack: Tensor) -> Tensor:
        result, *others = stack
        for other in others:
            result = combine(result, other)
        return result

    return combined


def premul(factor: float | Tensor) -> Any:
    return dist._make_nccl_premul_sum(factor)


# The function of an operator on the stack of all ranks' values, and its dtypes.
OPERATORS: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Tensor], list[torch.dtype]]] = {
    "SUM": (lambda: Op.SUM, lambda stack: stack.sum(0), [*SUMS, torch.bool]),
    "AVG": (lambda: Op.AVG, mean, SUMS),
    "PREMUL_SUM": (lambda: premul(0.5), halves, SUMS),
    "PREMUL_SUM of a tensor": (lambda: premul(torch.tensor(0.5)), halves, SUMS),
    "PREMUL_SUM of a factor a rank": (lambda: premul(2.0 ** dist.get_rank()), doublings, SUMS),
    "PRODUCT": (lambda: Op.PRODUCT, lambda stack: stack.prod(0), ORDERED),
    "MIN": (lambda: Op.MIN, lambda stack: stack.amin(0), ORDERED),
    "MAX": (lambda: Op.MAX, lambda stack: stack.amax(0), ORDERED),
    "BAND": (lambda: Op.BAND, bitwise(torch.bitwise_and), BITS),
    "BOR": (lambda: Op.BOR, bitwise(torch.bitwise_or), BITS),
    "BXOR": (lambda: Op.BXOR, bitwise(torch.bitwise_xor), BITS),
}


def check(got: Tensor, want: Tensor, what: str) -> None:
    want = want.to(got.dtype)
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    assert torch.equal(got, want), f"{what}: {got}, not {want}"


def reduce_with(operator: str) -> None:
    make, reduced, dtypes = OPERATORS[operator]
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in dtypes:
        for shape in SHAPES:
            what = f"{operator} of {dtype} {shape}"
            want = reduced(everyone(shape, dtype))
            tensor = values(rank, shape, dtype)
            dist.all_reduce(tensor, make())
            check(tensor, want, what)
            tensor = values(rank, shape, dtype)
            dist.reduce(tensor, size - 1, make())
            check(tensor, want if rank == size - 1 else values(rank, shape, dtype), what)
        joined = everyone((3 * size,), dtype)
        output = torch.empty(3, dtype=dtype)
        dist.reduce_scatter_tensor(output, values(rank, (3 * size,), dtype), make())
        check(output, reduced(joined)[3 * rank : 3 * rank + 3], f"{operator} of {dtype}, scattered")


@on_both_transports
@pytest.mark.parametrize("operator", OPERATORS)
def test_reductions(operator: str, transport: str) -> None:
    on_ring(reduce_with, 3, operator, transport=transport)


def sum_large_integers() -> None:
    """Between 2^60 and 2^61, float64 has only every 256th integer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    large = [2**60 + 1, -(2**60) - 3, 2**53 + 1]
    totals = [sum(value + r for r in range(size)) for value in large]
    for factor in (1.0, 2.0, -3.0, torch.tensor(1), torch.tensor(2.0)):
        tensor = torch.tensor(large) + rank
        dist.all_reduce(tensor, premul(factor))
        assert tensor.tolist() == [total * int(factor) for total in totals], factor
    tensor = torch.tensor(large) + rank
    dist.all_reduce(tensor, Op.AVG)
    assert tensor.tolist() == [math.trunc(Fraction(total, size)) for total in totals]
    kind, text = error_of(lambda: dist.all_reduce(tensor, premul(torch.tensor(2**60 + 1))))
    assert kind == "InvalidArgumentError", text


@on_both_transports
def test_large_integers(transport: str) -> None:
    on_ring(sum_large_integers, 2, transport=transport)


def refused() -> list[str]:
    """Return the cases that succeed although the documentation calls them errors."""
    found = []
    for name, (make, _, dtypes) in OPERATORS.items():
        for dtype in MOVED:
            if dtype in dtypes:
                continue
            tensor = torch.zeros(3, dtype=torch.float32).to(dtype)
            kind, _ = error_of(lambda: dist.reduce(tensor, 0, make()))  # noqa: B023
            if kind not in ("InvalidArgumentError", "ValueError"):
                found.append(f"{name} of {dtype}: {kind}")
    return found


def test_everything_else_is_refused() -> None:
    assert on_ring(refused, 2) == [[], []]


def sum_pairs_of_halves() -> None:
    tensor = torch.full((3,), 1 + 2j, dtype=torch.complex64).to(torch.complex32)
    dist.all_reduce(tensor)
    assert torch.view_as_real(tensor).tolist() == [[2, 4]] * 3


def test_all_reduce_of_complex32() -> None:
    on_ring(sum_pairs_of_halves, 2)


def move(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def of(r: int, shape: tuple[int, ...]) -> Tensor:
        return patterned(r, shape, dtype, "cpu")

    def same(got: Tensor, want: Tensor) -> None:
        assert same_bits(got, want), (dtype, got, want)

    for shape in ((), (0,), (3, 2), (4099,)):
        own, root = of(rank, shape), len(shape) % size
        tensor = own.clone()
        dist.broadcast(tensor, root)
        same(tensor, of(root, shape))
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own)
        for r, part in enumerate(parts):
            same(part, of(r, shape))
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.gather(own, parts if rank == root else None, root)
        for r, part in enumerate(parts if rank == root else ()):
            same(part, of(r, shape))
        given = [of(r, shape) for r in range(size)] if rank == root else None
        output = torch.empty_like(own)
        dist.scatter(output, given, root)
        same(output, own)
        received = torch.empty_like(own)
        work = dist.isend(own, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        assert work is not None
        work.wait()
        same(received, of((rank - 1) % size, shape))
    gathered = torch.empty(5 * size, dtype=dtype)
    dist.all_gather_into_tensor(gathered, of(rank, (5,)))
    for r in range(size):
        same(gathered[5 * r : 5 * r + 5], of(r, (5,)))
    # Rank r sends r + s rows to rank s: the rows from the first, second, ... of its own.
    counts = [rank + other for other in range(size)]
    output = torch.empty(sum(counts), 2, dtype=dtype)
    dist.all_to_all_single(output, of(rank, (sum(counts), 2)), counts, counts)
    at = 0
    for other, count in enumerate(counts):
        before = sum(other + r for r in range(rank))
        sent = of(other, (sum(other + r for r in range(size)), 2))
        same(output[at : at + count].clone(), sent[before : before + count].clone())
        at += count


def move_all() -> None:
    for dtype in MOVED:
        move(dtype)


@on_both_transports
def test_moves(transport: str) -> None:
    assert len(FLOAT8) == 5
    on_ring(move_all, 3, transport=transport)
