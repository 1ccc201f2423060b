"""Every dtype in every operation: moved, reduced, or refused with the list of allowed dtypes."""

from __future__ import annotations

import re

import pytest
import torch
from dtype_checks import (
    COMPLEX,
    MOVED,
    MOVED_ONLY,
    check_averages_with_a_joined_rank,
    check_complex,
    check_complex_gradients,
    check_factors_of_integers,
    check_integer_averages,
    check_moves,
    patterned,
    same,
)
from pool import error_of, run
from worlds import on_both_transports, on_most_worlds

import torch_ring as hvd


@on_most_worlds
@pytest.mark.parametrize(
    "check", [check_moves, check_integer_averages, check_complex], ids=lambda check: check.__name__
)
def test_dtypes(check, transport, size):
    run(check, size, transport=transport)


@on_both_transports
@pytest.mark.parametrize(
    "check",
    [check_averages_with_a_joined_rank, check_factors_of_integers, check_complex_gradients],
    ids=lambda check: check.__name__,
)
def test_dtypes_in_other_uses(check, transport):
    run(check, 3, transport=transport)


def check_refusals() -> None:
    """A dtype without arithmetic is refused on this rank, with a list of the allowed dtypes."""
    lists = (
        "reductions take uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64 and "
        "bool, and Sum and Average also complex64 and complex128; uint16, uint32, uint64, "
        "complex32, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz and "
        "float8_e8m0fnu are only moved, by broadcast, allgather and alltoall"
    )
    none = [(dtype, op) for dtype in MOVED_ONLY for op in (hvd.Average, hvd.Sum, hvd.Max)]
    none += [(dtype, op) for dtype in COMPLEX for op in (hvd.Min, hvd.Max, hvd.Product)]
    for dtype, op in none:
        tensor = torch.zeros(4, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        name = str(dtype).removeprefix("torch.")
        what = f"there is no {op.name} of {name}: {lists}"
        calls = [hvd.allreduce, hvd.allreduce_, hvd.allreduce_async]
        calls += [hvd.reducescatter] if op in (hvd.Average, hvd.Sum) else []
        for call in calls:
            kind, text = error_of(lambda call=call, x=tensor, op=op: call(x, op=op))
            collective = call.__name__.partition("_")[0]
            assert (kind, text) == ("InvalidArgumentError", f"{collective}: {what}")
    unknown = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, lambda x: hvd.broadcast(x, 0)):
        kind, text = error_of(lambda call=call: call(unknown))
        assert kind == "InvalidArgumentError"
        assert text.startswith("dtype bits8 is not supported: use uint8, int8, int16, int32")
        assert "float8_e8m0fnu" in text
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_refusals_list_what_is_supported():
    run(check_refusals, 2)


def check_mismatches() -> None:
    """Dtypes of the same size are distinguished, and the job goes on."""
    rank = hvd.rank()
    for first, second in [
        (torch.int16, torch.uint16),
        (torch.int32, torch.uint32),
        (torch.int64, torch.uint64),
        (torch.complex64, torch.float64),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float16, torch.bfloat16),
    ]:
        mine = torch.zeros(6, dtype=torch.float32).to(second if rank else first)
        names = [str(dtype).removeprefix("torch.") for dtype in (first, second)]
        for call in (
            lambda x: hvd.broadcast(x, 0),
            lambda x: hvd.broadcast_(x, 0),
            hvd.allgather,
            lambda x: hvd.alltoall(x, [0] * hvd.size()),
        ):
            kind, text = error_of(lambda call=call, x=mine: call(x))
            assert kind == "MismatchError", (kind, text)
            assert f" {names[0]} [" in text
            assert f" {names[1]} [" in text
        kind, text = error_of(lambda x=mine: hvd.broadcast_parameters({"p": x}, 0))
        assert kind == "MismatchError", (kind, text)
        assert all(re.search(rf"\b{name}\b", text) for name in names), text
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@on_both_transports
def test_dtypes_of_one_size_are_a_mismatch(transport):
    run(check_mismatches, 2, transport=transport)


def check_other_senders() -> None:
    """broadcast_parameters takes all dtypes, and the sparse allreduce complex numbers, too."""
    rank, size = hvd.rank(), hvd.size()
    state = {str(dtype): patterned(rank, (5,), dtype, "cpu") for dtype in MOVED}
    hvd.broadcast_parameters(state, 0)
    assert all(same(x, patterned(0, (5,), x.dtype, "cpu")) for x in state.values())
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([2 + 4j]), (size,))
    summed = hvd.sparse_allreduce_async(sparse, op=hvd.Sum)().to_dense()
    assert summed.tolist() == [2 + 4j] * size


def test_dtypes_in_what_is_built_on_collectives():
    run(check_other_senders, 2)
