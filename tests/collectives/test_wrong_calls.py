# SPDX-License-Identifier: Apache-2.0
"""Mismatches among the ranks, and wrong arguments: an error, and the job goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from closed_form import BITWISE, COMPLEX, MOVED_ONLY, every_call
from on_ranks import on_ranks
from pool import error_of, expect_error
from torch.distributed import ReduceOp

import torch_ring as hvd

Call = Callable[[], object]


def expect(kind: str, cases: list[tuple[Call, str]]) -> None:
    """Check that each call raises an error of a kind, whose text has a match of a pattern."""
    for call, pattern in cases:
        found, text = error_of(call)
        assert found == kind, (pattern, found, text)
        assert re.search(pattern, text, re.DOTALL), (pattern, text)


def work_on() -> None:
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [float(hvd.size())] * 2


def mismatches() -> list[tuple[Call, str]]:
    rank, odd = hvd.rank(), hvd.rank() % 2
    t, ints = torch.zeros(3), torch.zeros(3, dtype=torch.int32)
    splits = [0] * hvd.size()
    large = torch.zeros(1_000_000 + rank)
    cases: list[tuple[Call, str]] = [
        (
            lambda: hvd.allreduce(torch.zeros(3 + rank), name="a"),
            r"rank 0: allreduce 'a' float32 \[3\] Average; rank 1: allreduce 'a' float32 \[4\] Av",
        ),
        (lambda: hvd.allreduce([t, ints][odd]), r" int32 \[3\] Average"),
        (lambda: hvd.allreduce(t, op=[hvd.Sum, hvd.Max][odd]), r"\[3\] Sum; rank 1: .*\[3\] Max"),
        (lambda: hvd.allreduce(ints, op=[hvd.Band, hvd.Bor][odd]), r"\[3\] Band.*int32 \[3\] Bor"),
        (lambda: hvd.allreduce(t, name="a", prescale_factor=1.0 + rank), "prescale 2"),
        (lambda: hvd.broadcast(t, root_rank=odd), r"root 0; rank 1: .* float32 \[3\] root 1"),
        (
            lambda: hvd.allgather(torch.zeros(2, 3 + rank), name="g"),
            r"rank 0: allgather 'g' float32 \[\*, 3\]; rank 1: allgather 'g' float32 \[\*, 4\]",
        ),
        (lambda: hvd.alltoall(torch.ones(hvd.size(), 1 + rank), name="columns"), "rank 1"),
        (lambda: hvd.reducescatter(torch.ones(2 + rank), name="rows"), "rank 1"),
        (lambda: hvd.barrier() if rank else hvd.allreduce(t), ": barrier '#barrier.1'"),
        (lambda: hvd.allreduce(t, name=f"of {rank}"), "the ranks wait for different collectives"),
        (lambda: hvd.allreduce(large, name="large"), r"float32 \[1000000\]"),
    ]
    for first, second in [
        (torch.int16, torch.uint16),
        (torch.complex64, torch.float64),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float16, torch.bfloat16),
    ]:
        mine = torch.zeros(6, dtype=torch.float32).to(second if odd else first)
        names = [str(dtype).removeprefix("torch.") for dtype in (first, second)]
        both = rf"^(?=.*\b{names[0]}\b)(?=.*\b{names[1]}\b)"
        for call in (
            partial(hvd.broadcast, mine, 0),
            partial(hvd.allgather, mine),
            partial(hvd.alltoall, mine, splits),
            partial(hvd.broadcast_parameters, {"p": mine}, 0),
        ):
            cases.append((call, both))
    return cases


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (3, "tcp")])
@on_ranks(kind="one thread")
def test_mismatches(size, transport) -> None:
    for case in mismatches():
        expect("MismatchError", [case])
        work_on()
    assert issubclass(hvd.MismatchError, RuntimeError)  # as in Horovod


def tensor_without_memory() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def of_dual_number(call: Callable[[torch.Tensor], object]) -> None:
    with torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(torch.ones(4), torch.ones(4)))


REDUCED = (
    "reductions take uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64 and "
    "bool, and Sum and Average also complex64 and complex128; uint16, uint32, uint64, "
    "complex32, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz and "
    "float8_e8m0fnu are only moved, by broadcast, allgather and alltoall"
)
WHOLE = "Band, Bor and Bxor take uint8, int8, int16, int32, int64 and bool"


def wrong_tensors() -> list[tuple[Call, str]]:
    t, flags = torch.zeros(3), torch.ones(3) > 0
    lines: list[tuple[Call, str]] = [
        (lambda: hvd.allreduce(t.to_sparse()), "not dense"),
        (lambda: hvd.reducescatter(t.to_sparse()), "not dense"),
        (lambda: hvd.allreduce(torch.nested.nested_tensor([torch.ones(1 << 20)] * 2)), "not dense"),
        (lambda: hvd.sparse_allreduce_async(t), "sparse COO tensor: a dense one goes to allreduce"),
        (lambda: hvd.allreduce(t.to("meta")), "meta"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "a scalar has no first dimension"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), "scalar"),
        (lambda: hvd.alltoall(torch.tensor(1.0)), "scalar"),
        (lambda: hvd.allreduce_(torch.ones(1).expand(5)), r"expanded tensor.*clone\(\) it"),
        (lambda: hvd.grouped_allreduce_([torch.ones(1).expand(5)]), "expanded tensor"),
        (lambda: hvd.broadcast_(torch.ones(1).expand(5), 0), "expanded tensor"),
        (lambda: hvd.broadcast_(torch._efficientzerotensor((4,)), 0), "ZeroTensor"),
        (lambda: hvd.allgather(tensor_without_memory()), "storage was resized"),
        (lambda: torch.func.vmap(hvd.allreduce)(torch.ones(2, 3)), "has no memory"),
        (lambda: hvd.grouped_allreduce(t), r"a group is a list of tensors, .* got Tensor$"),
        (lambda: hvd.grouped_allreduce([t, 1]), "list of tensors"),
        (lambda: hvd.grouped_allreduce([t, t.to("meta")]), "several devices"),
        (lambda: hvd.grouped_allreduce([t, t.to(torch.complex32)]), "complex32"),
        (lambda: hvd.allreduce(flags), "bool tensors take Min, Max, Product, Band"),
        (lambda: hvd.reducescatter(flags, op=hvd.Sum), "bool"),
        (lambda: hvd.allreduce(t.long(), op=hvd.Adasum), "Adasum needs floating point"),
    ]
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        lines.append((partial(of_dual_number, call), "forward-mode"))
    unknown = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, partial(hvd.broadcast, root_rank=0)):
        text = "^dtype bits8 is not supported: use uint8, int8, int16, int32.*float8_e8m0fnu"
        lines.append((partial(call, unknown), text))
    none = [(dtype, op, REDUCED) for dtype in MOVED_ONLY for op in (hvd.Average, hvd.Sum, hvd.Max)]
    none += [(dtype, op, REDUCED) for dtype in COMPLEX for op in (hvd.Min, hvd.Max, hvd.Product)]
    none += [(dtype, op, WHOLE) for dtype in (torch.float32, torch.uint16) for op in BITWISE]
    for dtype, op, why in none:
        tensor = torch.zeros(4, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        name = str(dtype).removeprefix("torch.")
        calls = [hvd.allreduce, hvd.allreduce_, hvd.allreduce_async]
        calls += [hvd.reducescatter] if op in (hvd.Average, hvd.Sum) else []
        for call in calls:
            what = f"{call.__name__.partition('_')[0]}: there is no {op.name} of {name}: {why}"
            lines.append((partial(call, tensor, op=op), f"^{re.escape(what)}$"))
    return lines


def wrong_operators() -> list[tuple[Call, str]]:
    t = torch.ones(3)
    every = (
        "hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product, hvd.Band, hvd.Bor or "
        "hvd.Bxor"
    )
    lines: list[tuple[Call, str]] = []
    for op, got in [
        ("sum", "'sum': use hvd.Sum"),
        ("mean", "'mean': use hvd.Average"),
        (ReduceOp.SUM, "<RedOpType.SUM: 0>: use hvd.Sum"),  # 0 is Average here
        (ReduceOp.AVG, "<RedOpType.AVG: 1>: use hvd.Average"),
        (torch.max, f"{torch.max!r}: use hvd.Max"),
        (9, "9"),
        (-1, "-1"),
        (1.0, "1.0"),
        (True, "True"),
        (ReduceOp.BAND, f"{ReduceOp.BAND!r}: use hvd.Band"),
        (ReduceOp.BXOR, f"{ReduceOp.BXOR!r}: use hvd.Bxor"),
    ]:
        text = f"^{re.escape(f'op must be {every}; got {got}')}$"
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
            lines.append((partial(call, t, op=op), text))
        for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_async_):
            lines.append((partial(call, [t], op=op), text))
    for call, argument in [
        (hvd.reducescatter, t),
        (hvd.reducescatter_async, t),
        (hvd.grouped_reducescatter, [t]),
        (hvd.sparse_allreduce_async, t.to_sparse()),
    ]:
        for op, got in [
            ("sum", "'sum': use hvd.Sum"),
            (hvd.Max, "hvd.Max"),
            (hvd.Product, "hvd.Product"),
            (hvd.Adasum, "hvd.Adasum"),
            (ReduceOp.MAX, repr(ReduceOp.MAX)),
        ]:
            text = f"op must be hvd.Average or hvd.Sum; got {got}"
            lines.append((partial(call, argument, op=op), f"^{re.escape(text)}$"))
    for call, argument in [(hvd.allgather, t), (hvd.grouped_allgather, [t])]:
        lines.append((partial(call, argument, grad_op=hvd.Max), "grad_op must be hvd.Average or"))
    for flag, use in [(hvd.Sum, "op=hvd.Sum"), ("sum", "op=hvd.Sum"), ("loss", "name='loss'")]:
        text = f"^`average` must be True or False; got .*: use {use}$"
        lines.append((partial(hvd.allreduce, t, flag), text))
    return [*lines, (lambda: hvd.allreduce(t, average=True, op=hvd.Sum), "not both")]


def wrong_values() -> list[tuple[Call, str]]:
    size, rows = hvd.size(), torch.ones(2 * hvd.size() + 1, 2)
    t = torch.zeros(3)
    lines: list[tuple[Call, str]] = [
        (lambda: hvd.broadcast(t, root_rank=9), "root_rank=9 is not in the process set"),
        (lambda: hvd.broadcast(t, "0"), "root_rank='0'"),
        (lambda: hvd.allreduce(t, name="#1"), "reserved"),
        (lambda: hvd.allreduce(t, name="x" * 5000), "longer than 4096"),
        (lambda: hvd.poll(17), "is not a handle"),
        (lambda: hvd.synchronize(12345), "is not a handle"),
    ]
    for splits, why in [
        ([1] * (size + 1), f"{size + 1} splits for {size} ranks"),
        ([], f"0 splits for {size} ranks"),
        ([-1, *[2] * (size - 1)], "negative"),
        ([9] * size, "more rows"),
        (torch.tensor([0.5] * size), "integers"),
        ([1.0] * size, "integers"),
        (["1"] * size, "integers"),
        (torch.tensor([[1] * size]), "integers"),
        (2, "integers"),
        *([(None, f"{2 * size + 1} rows do not divide")] if size > 1 else []),
    ]:
        for call in (hvd.alltoall, hvd.alltoall_async):
            lines.append((partial(call, rows, splits), why))
    return lines


def wrong_parameters() -> list[tuple[Call, str]]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = [
        (model, r"takes model.state_dict\(\) or a list of tensors, not Linear$"),
        (optimizer, r"not SGD: use broadcast_optimizer_state\(\)$"),
        ([torch.ones(1), torch.ones(1).numpy()], "item 1 of the list is ndarray"),
    ]
    return [(partial(hvd.broadcast_parameters, given, 0), text) for given, text in lines]


def wrong_types() -> list[tuple[Call, str]]:
    tensor = torch.ones(2)
    lines: list[tuple[Call, str]] = []
    for name in ("allreduce", "allgather", "alltoall", "reducescatter"):
        for call in (getattr(hvd, name), getattr(hvd, f"{name}_async")):
            takes = rf"^{name}\w* takes a torch.Tensor, not "
            grouped = f"grouped_{call.__name__}" if name != "alltoall" else r"torch.stack\(\)"
            for given, kind in [
                ([1.0, 2.0], r"list: use torch.as_tensor\(\)"),
                (tensor.numpy(), r"ndarray: use torch.as_tensor\(\)"),
                ([tensor], f"list: use {grouped}"),
            ]:
                lines.append((partial(call, given), f"{takes}{kind}$"))
    for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
        lines.append((partial(call, None, 0), r"takes a torch.Tensor, not NoneType$"))
    for call in (hvd.allreduce_, hvd.allreduce_async_):
        lines.append((partial(call, "weight"), r"takes a torch.Tensor, not str$"))
    for form, call in every_call(tensor).items():
        name = form.removeprefix("grouped_").partition("_")[0]
        for wrong, kind in ((5, "int"), (0, "int"), ([], "list"), (b"a", "bytes")):
            text = f"^{name}: name must be a string, not {kind}$"
            lines.append((partial(call, name=wrong), text))
    for call in (hvd.allreduce_, hvd.allreduce_async, hvd.reducescatter):
        for factor in ("prescale_factor", "postscale_factor"):
            for value, kind in (("2", "str"), (None, "NoneType")):
                text = f"{factor} must be a number, not {kind}$"
                lines.append((partial(call, tensor, **{factor: value}), text))
    model = torch.nn.Linear(2, 2)
    state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    for wrong, text in [
        (model, r"not Linear: use broadcast_parameters\(\)$"),
        (state, r"the optimizer itself, not dict$"),
    ]:
        lines.append((partial(hvd.broadcast_optimizer_state, wrong, 0), text))
    return lines


TABLES: dict[str, list[Callable[[], list[tuple[Call, str]]]]] = {
    "InvalidArgumentError": [wrong_tensors, wrong_operators, wrong_values],
    "ValueError": [wrong_parameters],
    "TypeError": [wrong_types],
}


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_wrong_arguments(size) -> None:
    for kind, tables in TABLES.items():
        for table in tables:
            expect(kind, table())
            work_on()  # nothing was sent
    for horovods in (ValueError, RuntimeError):
        assert issubclass(hvd.InvalidArgumentError, horovods)
    assert not issubclass(hvd.InvalidArgumentError, hvd.HorovodInternalError)  # no retry


@on_ranks(3)
def test_ranks_outside_a_set_are_refused() -> None:
    ends, x = hvd.add_process_set([2, 0]), torch.ones(2)
    rows = torch.sparse_coo_tensor([[0]], [1.0], (2,))
    calls: list[Callable[..., Any]] = [
        *every_call(x).values(),
        partial(hvd.sparse_allreduce_async, rows),
        partial(hvd.broadcast_object, 1, 0),
        partial(hvd.allgather_object, 1),
        partial(hvd.broadcast_parameters, [x], 0),
        hvd.barrier,
    ]
    strangers = [hvd.ProcessSet([0]), *([] if ends.included() else [ends])]
    for call in calls:
        lines = [
            (partial(call, process_set=each), "has not been added|is not in") for each in strangers
        ]
        lines.append((partial(call, process_set=[0, 1]), "is not a ProcessSet"))
        expect("InvalidArgumentError", lines)
    if ends.included():
        for call in (hvd.broadcast, hvd.broadcast_async_):
            wrong_root = partial(call, x, 1, process_set=ends)
            expect("InvalidArgumentError", [(wrong_root, "root_rank=1 is not in")])
        assert hvd.allreduce(x, op=hvd.Sum, process_set=ends).tolist() == [2.0, 2.0]
    ids = {0: [0, 1, 2], ends.process_set_id: [0, 2]}
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == ids
    work_on()


@on_ranks(2)
def test_numbers_of_operators() -> None:
    for op in (1, np.int64(1)):  # Horovod's number of Sum
        assert hvd.allreduce(torch.ones(3), op=op).tolist() == [hvd.size()] * 3


@on_ranks(2)
def test_two_threads_without_names() -> None:
    """Two operations, of which rank 1 begins one in a second thread, in another order."""
    hvd.barrier()
    reduce = partial(hvd.allreduce_async, torch.ones(3))
    cast = partial(hvd.broadcast_async, torch.ones(5), 0)
    if hvd.rank() == 1:
        with ThreadPoolExecutor(1) as thread:
            handles = [thread.submit(reduce).result(), cast()]
    else:
        handles = [cast(), reduce()]
    words = "Operations of this world come from two threads of rank 1: give them names"
    for handle in handles:
        expect_error("MismatchError", words, partial(hvd.synchronize, handle))
    hvd.barrier()
    named = partial(hvd.allreduce, torch.zeros(3 + hvd.rank()), name="a")
    assert "threads" not in expect_error("MismatchError", "", named)


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (3, "tcp")])
@on_ranks()
def test_groups_that_differ_are_refused_in_their_call(size, transport) -> None:
    rank, one = hvd.rank(), torch.ones(3)
    for name in (None, "g"):
        tensors = [one] * (2 + rank)
        for call in (hvd.grouped_allreduce, hvd.grouped_allgather):
            grouped = partial(call, tensors, name=name)
            expect("MismatchError", [(grouped, r"in a group of 2; rank 1: .* a group of 3")])
            work_on()  # the next, innocent one
    others = partial(hvd.grouped_allreduce, [one] * 3)
    alone = partial(hvd.allreduce, one) if rank == 0 else others
    expect("MismatchError", [(alone, r"rank 1: allreduce '#\d+.* in a group of 3\.")])
    work_on()
    # The members of the longer groups take several rounds to announce.
    long = partial(hvd.grouped_allreduce, [torch.ones(1)] * (300 + 100 * rank), name="long" * 200)
    expect("MismatchError", [(long, "in a group of 300;")])
    work_on()
    handle = hvd.grouped_allreduce_async([one, torch.ones(3 + rank)], name="g")
    expect("MismatchError", [(partial(hvd.synchronize, handle), r"g\.1")])
    assert hvd.grouped_allreduce([one], name="g", op=hvd.Sum)[0].tolist() == [hvd.size()] * 3
