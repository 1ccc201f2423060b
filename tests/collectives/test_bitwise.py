"""Band, Bor and Bxor of integers and bools, and the sentences that refuse other dtypes."""

from __future__ import annotations

import functools

import torch
from pool import error_of, run
from worlds import on_both_transports, on_most_worlds

import torch_ring as hvd

WHOLES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
BITWISE = {
    hvd.Band: torch.bitwise_and,
    hvd.Bor: torch.bitwise_or,
    hvd.Bxor: torch.bitwise_xor,
}


def bits_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers whose bits are set on some ranks and clear on others."""
    values = torch.arange(count) * 37 + rank * 101 + torch.arange(count) % 7 * 64 - 300
    return values % 3 % 2 == 1 if dtype == torch.bool else values.to(dtype)


def check_bitwise() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in WHOLES:
        for count in (0, 1, 2, 4_099, 300_007):
            if count > 5_000 and dtype != torch.int32:
                continue
            mine = bits_of(rank, count, dtype)
            for op, combine in BITWISE.items():
                want = functools.reduce(combine, [bits_of(r, count, dtype) for r in range(size)])
                assert torch.equal(hvd.allreduce(mine, op=op), want)
                assert torch.equal(mine, bits_of(rank, count, dtype))
    every = [bits_of(rank, 5, torch.int64), bits_of(rank, 7, torch.int64)]
    many = hvd.grouped_allreduce(every, op=hvd.Bxor)
    for got, count in zip(many, (5, 7), strict=True):
        numbers = [bits_of(r, count, torch.int64) for r in range(size)]
        assert torch.equal(got, functools.reduce(torch.bitwise_xor, numbers))


@on_most_worlds
def test_bitwise_operators(transport, size):
    run(check_bitwise, size, transport=transport)


def check_joined() -> None:
    """A rank that has joined changes no bit."""
    if hvd.rank() > 0:
        mine = bits_of(hvd.rank(), 9, torch.int32)
        others = [bits_of(r, 9, torch.int32) for r in range(1, hvd.size())]
        for op, combine in BITWISE.items():
            assert torch.equal(hvd.allreduce(mine, op=op), functools.reduce(combine, others))
    hvd.join()


@on_both_transports
def test_bitwise_operators_with_a_joined_rank(transport):
    run(check_joined, 3, transport=transport)


def check_refusals() -> None:
    names = "Band, Bor and Bxor take uint8, int8, int16, int32, int64 and bool"
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.uint16):
        name = str(dtype).removeprefix("torch.")
        ones = torch.ones(3, dtype=dtype)
        for op in BITWISE:
            assert error_of(lambda op=op, x=ones: hvd.allreduce(x, op=op)) == (
                "InvalidArgumentError",
                f"allreduce: there is no {op.name} of {name}: {names}",
            )
    kind, text = error_of(lambda: hvd.allreduce(torch.ones(3), op=torch.distributed.ReduceOp.BXOR))
    assert (kind, text.endswith(": use hvd.Bxor")) == ("InvalidArgumentError", True)
    ops = (hvd.Band, hvd.Bor)
    kind, text = error_of(
        lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32), op=ops[hvd.rank()])
    )
    assert kind == "MismatchError"
    assert "int32 [3] Band" in text
    assert "int32 [3] Bor" in text


@on_both_transports
def test_bitwise_operators_are_refused_and_agreed_on(transport):
    run(check_refusals, 2, transport=transport)
