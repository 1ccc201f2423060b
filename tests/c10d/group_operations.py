# SPDX-License-Identifier: Apache-2.0
"""Operations in a group, drawn at random, and their results by definition.

Every rank knows the values of all others, so it computes the results alone. Values to reduce are
small whole numbers, exact in every dtype; values that are only moved are any bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from closed_form import COLLECTIVES, COMPLEX, INTEGERS, MOVED, NUMBERS, reduced, same
from torch import Tensor

import torch_ring as hvd

SHAPES: list[tuple[int, ...]] = [(0,), (1,), (), (3, 2), (17,), (40, 25), (70_000,)]
Op = dist.ReduceOp


@dataclass
class Pending:
    """An operation in flight."""

    what: str
    done: Callable[[], bool]
    wait: Callable[[], Any]
    check: Callable[[], None]


@dataclass
class Group:
    """A group or a process set, as its members see it."""

    ranks: list[int]  # in torch.distributed, by rank of the group
    handle: Any
    rank: int  # of this process in it
    pending: list[Pending] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.ranks)


def by(op: hvd.ReduceOp) -> Callable[[Tensor], Tensor]:
    return lambda stack: reduced(stack, op)


def halves(stack: Tensor) -> Tensor:
    """Return the sum of halves; of integers, each half without the fraction."""
    if stack.is_floating_point() or stack.is_complex():
        return (stack * 0.5).sum(0)
    return torch.div(stack, 2, rounding_mode="trunc").sum(0)


def doublings(stack: Tensor) -> Tensor:
    """Return the sum with weights that double from rank to rank."""
    return torch.stack([values * 2**rank for rank, values in enumerate(stack)]).sum(0)


def premul(factor: float | Tensor) -> Any:
    return dist._make_nccl_premul_sum(factor)


# An operator on a rank of a group, its function of all ranks' values, and its dtypes.
SUMS, ORDERED = [*NUMBERS, *COMPLEX], [*NUMBERS, torch.bool]
OPERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Tensor], Tensor], list[torch.dtype]]] = {
    "SUM": (lambda _: Op.SUM, by(hvd.Sum), [*SUMS, torch.bool]),
    "AVG": (lambda _: Op.AVG, by(hvd.Average), SUMS),
    "PREMUL_SUM": (lambda _: premul(0.5), halves, SUMS),
    "PREMUL_SUM of a tensor": (lambda _: premul(torch.tensor(0.5)), halves, SUMS),
    "PREMUL_SUM of a factor a rank": (lambda rank: premul(2.0**rank), doublings, SUMS),
    "PRODUCT": (lambda _: Op.PRODUCT, by(hvd.Product), ORDERED),
    "MIN": (lambda _: Op.MIN, by(hvd.Min), ORDERED),
    "MAX": (lambda _: Op.MAX, by(hvd.Max), ORDERED),
    "BAND": (lambda _: Op.BAND, by(hvd.Band), [*INTEGERS, torch.bool]),
    "BOR": (lambda _: Op.BOR, by(hvd.Bor), [*INTEGERS, torch.bool]),
    "BXOR": (lambda _: Op.BXOR, by(hvd.Bxor), [*INTEGERS, torch.bool]),
}


class Draw:
    """The draw for one operation: the same on all ranks, whether or not they are members.

    Args:
        seed: of what all ranks draw alike.
        number: of the operation.
        own: draws that each rank makes for itself.
        operator, dtype, shape: in place of drawn ones.
        device: of the tensors of torch.distributed's operations.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        own: random.Random,
        *,
        operator: str = "",
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
        device: str = "cpu",
    ) -> None:
        self.random, self.own = random.Random(seed), own
        self.number = number
        self.is_async = self.random.random() < 0.6
        self.shape = self.random.choice(SHAPES) if shape is None else shape
        self.seed, self.device = seed, device
        self._operator, self._dtype = operator, dtype

    def dtype(self, dtypes: Sequence[torch.dtype] = MOVED) -> torch.dtype:
        return self._dtype or self.random.choice(dtypes)

    def operator(self, group: Group) -> tuple[Any, torch.dtype, Callable[[Tensor], Tensor]]:
        """Return an operator, a dtype, and how values of all ranks are reduced."""
        make, combine, dtypes = OPERATORS[self._operator or self.random.choice([*OPERATORS])]
        dtype = self.dtype(dtypes)
        return make(group.rank), dtype, lambda stack: combine(stack).to(dtype)

    def numbers(self, group: Group, dtype: torch.dtype, *rows: int) -> Tensor:
        """Return the small numbers of all members, one after the other in dimension 0."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (group.size, *rows, *self.shape)
        low = 0 if dtype in (torch.uint8, torch.bool) else -3
        numbers = torch.randint(low, 2 if dtype == torch.bool else 4, shape, generator=generator)
        return numbers.to(dtype) * (1 + 2j) if dtype.is_complex else numbers.to(dtype)

    def bits(self, rank: int, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a tensor of any bits, as a rank has it."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * rank)
        chosen = self.shape if shape is None else shape
        count = torch.Size(chosen).numel() * dtype.itemsize
        highest = 2 if dtype == torch.bool else 256
        octets = torch.randint(0, highest, (count,), dtype=torch.uint8, generator=generator)
        return octets.view(dtype).view(chosen)

    def all_bits(self, group: Group, dtype: torch.dtype) -> list[Tensor]:
        return [self.bits(rank, dtype) for rank in group.ranks]

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return a copy, which may have gaps between its elements."""
        tensor = tensor.to(self.device)
        if self.own.random() < 0.25:
            return tensor.new_empty(*tensor.shape, 2)[..., 0].copy_(tensor)
        return tensor.clone()

    def room(self, tensor: Tensor) -> Tensor:
        """Return a tensor for values like another's."""
        return self.laid_out(torch.empty_like(tensor))


def check(got: Tensor, want: Tensor) -> None:
    assert same(got, want), f"{got}, not {want}"


def pending(what: str, work: Any, got: Sequence[Tensor], want: Sequence[Tensor]) -> Pending:
    """Return an operation of torch.distributed; `work`: None for a blocking one."""

    def check_all() -> None:
        for one, other in zip(got, want, strict=True):
            check(one, other)

    if work is None:
        return Pending(what, lambda: True, lambda: None, check_all)
    return Pending(what, work.is_completed, work.wait, check_all)


# --- torch.distributed


def all_reduce(draw: Draw, group: Group) -> list[Pending]:
    op, dtype, combine = draw.operator(group)
    values = draw.numbers(group, dtype)
    tensor = draw.laid_out(values[group.rank])
    work = dist.all_reduce(tensor, op, group=group.handle, async_op=draw.is_async)
    return [pending("all_reduce", work, [tensor], [combine(values)])]


def reduce(draw: Draw, group: Group) -> list[Pending]:
    op, dtype, combine = draw.operator(group)
    root = draw.random.choice(group.ranks)
    values = draw.numbers(group, dtype)
    tensor = draw.laid_out(values[group.rank])
    work = dist.reduce(tensor, root, op, group=group.handle, async_op=draw.is_async)
    want = combine(values) if root == dist.get_rank() else values[group.rank]
    return [pending("reduce", work, [tensor], [want])]


def reduce_scatter(draw: Draw, group: Group) -> list[Pending]:
    op, dtype, combine = draw.operator(group)
    values = draw.numbers(group, dtype, group.size)
    want = combine(values)[group.rank]
    output, own = draw.room(want), draw.laid_out(values[group.rank])
    call, given = dist.reduce_scatter, list(own.unbind(0))
    if draw.random.random() < 0.5:
        call, given = dist.reduce_scatter_tensor, own.flatten(0, min(1, own.dim() - 1))
    work = call(output, given, op, group=group.handle, async_op=draw.is_async)
    return [pending(call.__name__, work, [output], [want])]


def broadcast(draw: Draw, group: Group) -> list[Pending]:
    dtype, root = draw.dtype(), draw.random.choice(group.ranks)
    tensor = draw.laid_out(draw.bits(dist.get_rank(), dtype))
    work = dist.broadcast(tensor, root, group=group.handle, async_op=draw.is_async)
    return [pending("broadcast", work, [tensor], [draw.bits(root, dtype)])]


def all_gather(draw: Draw, group: Group) -> list[Pending]:
    dtype = draw.dtype()
    values = draw.all_bits(group, dtype)
    own = draw.laid_out(values[group.rank])
    if draw.random.random() < 0.5:
        parts = [draw.room(own) for _ in group.ranks]
        work = dist.all_gather(parts, own, group=group.handle, async_op=draw.is_async)
        return [pending("all_gather", work, parts, values)]
    whole = own.new_empty(group.size, *draw.shape)
    work = dist.all_gather_into_tensor(whole, own, group=group.handle, async_op=draw.is_async)
    return [pending("all_gather_into_tensor", work, list(whole), values)]


def gather(draw: Draw, group: Group) -> list[Pending]:
    dtype, root = draw.dtype(), draw.random.choice(group.ranks)
    values, is_root = draw.all_bits(group, dtype), root == dist.get_rank()
    own = draw.laid_out(values[group.rank])
    parts = [draw.room(own) for _ in group.ranks] if is_root else None
    work = dist.gather(own, parts, root, group=group.handle, async_op=draw.is_async)
    return [pending("gather", work, parts or [], values if is_root else [])]


def scatter(draw: Draw, group: Group) -> list[Pending]:
    dtype, root = draw.dtype(), draw.random.choice(group.ranks)
    values = draw.all_bits(group, dtype)
    tensor = draw.room(values[0])
    parts = [draw.laid_out(value) for value in values] if root == dist.get_rank() else None
    work = dist.scatter(tensor, parts, root, group=group.handle, async_op=draw.is_async)
    return [pending("scatter", work, [tensor], [values[group.rank]])]


def all_to_all(draw: Draw, group: Group) -> list[Pending]:
    dtype = draw.dtype()
    splits = [[draw.random.randint(0, 4) for _ in group.ranks] for _ in group.ranks]
    rows = [draw.bits(r, dtype, (sum(splits[i]), 3)) for i, r in enumerate(group.ranks)]
    parts = [part.split(splits[i]) for i, part in enumerate(rows)]
    want = [parts[i][group.rank] for i in range(group.size)]
    own = draw.laid_out(rows[group.rank])
    got = [own.new_empty(part.shape) for part in want]
    if draw.random.random() < 0.5:
        given = list(own.split(splits[group.rank]))
        work = dist.all_to_all(got, given, group=group.handle, async_op=draw.is_async)
        return [pending("all_to_all", work, got, want)]
    output = own.new_empty(sum(map(len, got)), 3)
    sizes = [len(part) for part in want], splits[group.rank]
    work = dist.all_to_all_single(output, own, *sizes, group.handle, async_op=draw.is_async)
    return [pending("all_to_all_single", work, output.split(sizes[0]), want)]


def shift(draw: Draw, group: Group) -> list[Pending]:
    """Messages around the ring."""
    if group.size == 1:
        return []
    dtype, tag = draw.dtype(), draw.random.randint(0, 2)
    following = group.ranks[(group.rank + 1) % group.size]
    previous = group.ranks[group.rank - 1]
    sent = draw.laid_out(draw.bits(dist.get_rank(), dtype))
    got = draw.room(sent)
    receive = dist.irecv(got, previous, group=group.handle, tag=tag)
    send = dist.isend(sent, following, group=group.handle, tag=tag)
    return [
        pending("isend", send, [], []),
        pending("irecv", receive, [got], [draw.bits(previous, dtype)]),
    ]


def barrier(draw: Draw, group: Group) -> list[Pending]:
    return [pending("barrier", dist.barrier(group=group.handle, async_op=draw.is_async), [], [])]


def objects(draw: Draw, group: Group) -> list[Pending]:
    got: list[Any] = [None] * group.size
    dist.all_gather_object(got, {"rank": dist.get_rank(), "n": draw.number}, group=group.handle)
    assert got == [{"rank": rank, "n": draw.number} for rank in group.ranks], got
    return []


def callback(draw: Draw, group: Group) -> list[Pending]:
    """A future whose callback is part of the result."""
    values = draw.numbers(group, torch.float32)
    tensor = draw.laid_out(values[group.rank])
    work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    assert work is not None
    future = work.get_future().then(lambda done: done.value()[0] + 1)
    want = values.sum(0) + 1
    return [Pending("callback", future.done, future.wait, lambda: check(future.value(), want))]


REDUCTIONS = [all_reduce, reduce, reduce_scatter]
MOVES = [broadcast, all_gather, gather, scatter, all_to_all, shift]
GROUPS_OPERATIONS = [
    *[all_reduce] * 3,
    *REDUCTIONS,
    *MOVES,
    *(barrier, objects, callback),
]

# --- Horovod's names


def of_horovod(what: str, handle: int, want: Tensor) -> Pending:
    result: list[Any] = []
    return Pending(
        what,
        lambda: hvd.poll(handle),
        lambda: result.append(hvd.synchronize(handle)),
        lambda: check(result[0], want),
    )


def hvd_allreduces(draw: Draw, group: Group) -> list[Pending]:
    """Several allreduces by name: each rank submits them in its own order."""
    begun: list[Pending] = []
    indices = list(range(draw.random.randint(1, 4)))
    kinds = [draw.random.choice([hvd.Sum, hvd.Average, hvd.Min, hvd.Max]) for _ in indices]
    dtypes = [draw.random.choice(NUMBERS) for _ in indices]
    draw.own.shuffle(indices)
    for index in indices:
        values = draw.numbers(group, dtypes[index])
        call = hvd.allreduce_async_ if draw.own.random() < 0.5 else hvd.allreduce_async
        handle = call(
            draw.laid_out(values[group.rank]),
            op=kinds[index],
            name=f"{draw.number}.{index}",
            process_set=group.handle,
        )
        want = reduced(values, kinds[index])
        begun.append(of_horovod(f"hvd.allreduce {kinds[index].name}", handle, want))
    return begun


def hvd_collective(draw: Draw, group: Group) -> list[Pending]:
    """Any form of any collective, waited for at once."""
    each = draw.random.choice(COLLECTIVES)
    form, dtype = draw.random.choice(each.forms), draw.random.choice(each.dtypes)
    rows = draw.random.choice([1, 4, 1000])
    parts = each.parts(group.size, (rows, 3), dtype)
    got = each.call(form, draw.laid_out(parts[group.rank]), rows, group.handle)
    check(got, each.result(parts, group.rank))
    return []


SETS_OPERATIONS = [*[hvd_allreduces] * 2, hvd_collective]
