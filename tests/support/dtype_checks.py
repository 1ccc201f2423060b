# SPDX-License-Identifier: Apache-2.0
"""Collectives of every dtype: functions that each rank calls, with the name of a device's type."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from closed_form import (
    BITWISE,
    COLLECTIVES,
    COMPLEX,
    INTEGERS,
    MOVED,
    Collective,
    reduced,
    same,
    shapes_of,
)
from torch import Tensor

import torch_ring as hvd

__all__ = [
    "check_a_joined_rank",
    "check_complex",
    "check_factors_of_integers",
    "check_gradients",
    "check_integer_averages",
    "check_layouts",
    "check_moves",
    "check_results",
]

# Ways for a tensor to lie in memory, by a tensor of its values.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "with gaps": lambda t: torch.stack([t, t], -1)[..., 0],
    "shared": lambda t: hvd.empty_shared(t.shape, dtype=t.dtype).copy_(t),
    "part of shared": lambda t: hvd.empty_shared(2, *t.shape, dtype=t.dtype)[1].copy_(t),
    "expanded": lambda t: t[:1].expand(len(t), -1),
    "channels last": lambda t: t.view(len(t), 2, 1, 3).to(memory_format=torch.channels_last),
    "negative": lambda t: torch._neg_view(-t),
    "negative with gaps": lambda t: torch._neg_view(torch.stack([-t, t], -1)[..., 0]),
    "imaginary": lambda t: (t * (1 + 2j)).conj().imag,
    "zero": lambda t: torch._efficientzerotensor(t.shape),
    "conjugate": lambda t: (t * (1 + 2j)).conj(),
}
READ_ONLY = ["expanded", "zero"]
OF_INTEGERS = list(LAYOUTS)[:6]


def check_results(
    device: str = "cpu",
    process_set: hvd.ProcessSet = hvd.global_process_set,
    dtypes: Sequence[torch.dtype] = MOVED,
    collectives: Sequence[Collective] = COLLECTIVES,
    shapes: Sequence[tuple[int, ...]] = (),
) -> None:
    """Check every collective with every dtype and shape. Its forms take turns.

    Those of every dtype are `shapes`, if there are any. A device may round averages otherwise.
    """
    index, size, turn = process_set.rank(), process_set.size(), 0
    for each in collectives:
        for dtype in each.dtypes:
            turn += 1  # as many shapes as forms would give each shape the same one
            for shape in (shapes or shapes_of(dtype)) if dtype in dtypes else ():
                if not shape and not each.takes_scalars:
                    continue
                parts = each.parts(size, shape, dtype)
                want = each.result(parts, index)
                form = each.forms[turn % len(each.forms)]
                turn += 1
                what = f"{form} {each.arguments(range(size), 0, 1)} of {dtype} {shape}"
                mine = parts[index].clone().to(device)
                got = each.call(form, mine, shape[0] if shape else 1, process_set)
                if device != "cpu" and op_of(each) == hvd.Average and dtype.is_floating_point:
                    torch.testing.assert_close(got.cpu(), want, msg=lambda m, what=what: what + m)
                else:
                    assert same(got, want), f"{what}: {got}, not {want}"
                assert got.device.type == device
                if form.endswith("_"):
                    assert got is mine, what
                else:
                    assert same(mine, parts[index]), f"{what}: its input has changed"


def op_of(each: Collective) -> hvd.ReduceOp | None:
    return each.arguments([0], 0, 1).get("op")


def check_layouts() -> None:
    """Check all forms of every collective with tensors of every layout."""
    rank, size = hvd.rank(), hvd.size()
    for each in COLLECTIVES:
        dtype = torch.float32 if torch.float32 in each.dtypes else torch.int32
        rows = [each.rows(size, index, 4) for index in range(size)]
        values = [
            torch.arange(6 * count, dtype=dtype).view(count, 6) + index
            for index, count in enumerate(rows)
        ]
        for layout, lay in LAYOUTS.items():
            is_taken = torch.complex64 in each.dtypes or layout != "conjugate"
            if not is_taken or (dtype == torch.int32 and layout not in OF_INTEGERS):
                continue
            laid = [lay(part) for part in values]
            plain = [part + torch.zeros(part.shape, dtype=part.dtype) for part in laid]
            want = each.result(plain, rank)
            for form in each.forms:
                if form.endswith("_") and layout in READ_ONLY:
                    continue
                mine, what = lay(values[rank]), f"{form} of tensors {layout}"
                got = each.call(form, mine, 4)
                torch.testing.assert_close(got, want, msg=lambda m, what=what: f"{what}: {m}")
                assert got is mine or not form.endswith("_"), what
                if layout == "with gaps" and got is mine:
                    assert same(mine._base[..., 1], values[rank]), f"{what}: the gaps"


def check_gradients(
    device: str = "cpu", process_set: hvd.ProcessSet = hvd.global_process_set
) -> None:
    """Check the gradients of every collective. Each member has a weight for its loss."""
    index, size = process_set.rank(), process_set.size()

    def loss_of(result: Tensor, weight: int) -> Tensor:
        result = torch.view_as_real(result) if result.is_complex() else result
        weights = torch.arange(result.numel(), device=result.device).view_as(result)
        return (result * weights * weight).sum()

    for each in COLLECTIVES:
        forms = [form for form in each.forms if not form.endswith(("_", "_async"))]
        for dtype in (torch.float32, torch.float64, *COMPLEX) if each.factor else ():
            leaves = [
                torch.zeros_like(part).requires_grad_() for part in each.parts(size, (3, 2), dtype)
            ]
            total = sum(loss_of(each.result(leaves, i), 1 + i) for i in range(size))
            (derivative,) = torch.autograd.grad(total, leaves[index], materialize_grads=True)
            for form in forms:
                mine = torch.zeros_like(leaves[index], device=device).requires_grad_()
                loss_of(each.call(form, mine, 3, process_set), 1 + index).backward()
                assert mine.grad is not None, form
                torch.testing.assert_close(
                    mine.grad.cpu(),
                    derivative * each.factor(size),
                    msg=lambda m, form=form: f"gradient of {form}: {m}",
                )


ROUNDED = (torch.float16, torch.bfloat16, torch.complex32)  # NCCL rounds their sums otherwise


def check_a_joined_rank(device: str = "cpu") -> None:
    """Check that a rank which has joined changes no sum, and counts in averages."""
    size, rank = hvd.size(), hvd.rank()
    reductions = [each for each in COLLECTIVES if each.name == "allreduce"]
    for each in reductions if rank < size - 1 else ():
        for dtype in each.dtypes:
            op = op_of(each)
            rounds = dtype in ROUNDED or (op == hvd.Average and dtype not in INTEGERS)
            if device != "cpu" and (op in BITWISE or rounds):  # docs/gpu.md
                continue
            parts = each.parts(size, (500,), dtype)
            zeros = [torch.zeros_like(parts[0])] if op == hvd.Average else []
            want = reduced(torch.stack([*parts[:-1], *zeros]), op)
            got = each.call("allreduce", parts[rank].to(device))
            assert same(got, want), f"{op.name} of {dtype}"
    hvd.join()


def check_factors_of_integers(device: str = "cpu") -> None:
    """Check that factors clamp, and truncate: the same on every transport and device."""
    size = hvd.size()
    for dtype in INTEGERS:
        high, low = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        mine = torch.tensor([high, low, 8, 5], dtype=dtype, device=device)
        for factors in ({"prescale_factor": 4.0}, {"postscale_factor": 4.0}):
            got = hvd.allreduce(mine, **factors).tolist()
            assert got == [high, low, 32, 20], (dtype, factors)
        got = hvd.allreduce(mine[2:], op=hvd.Sum, prescale_factor=0.3, postscale_factor=2.0)
        assert got.tolist() == [2 * size * 2, size * 1 * 2], dtype


def check_moves(device: str = "cpu") -> None:
    moves = [each for each in COLLECTIVES if each.name in ("broadcast", "allgather", "alltoall")]
    check_results(device, collectives=moves)


def check_integer_averages(device: str = "cpu") -> None:
    averages = [each for each in COLLECTIVES if op_of(each) == hvd.Average]
    check_results(device, dtypes=INTEGERS, collectives=averages)


def check_complex(device: str = "cpu") -> None:
    check_results(device, dtypes=COMPLEX)
