"""Random collectives by both APIs, in several groups and lives of one store.

All ranks draw the same program from its seed: lives of a store, overlapping groups, operations.
Each rank draws its own polls and waits. Values are small whole numbers, exact in every dtype, and
every rank knows the values of all others, so it computes the expected results alone. `--full` runs
many programs, RANDOM_COLLECTIVES=17 the one with that seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_ring as hvd
from tests.support.groups import IS_TORCH_2_14, TIMEOUT_S, default_group
from tests.support.pool import RanksFailed, run
from tests.support.slow import slow

PROGRAMS, ALL_PROGRAMS = 3, 300
ALONE = os.environ.get("RANDOM_COLLECTIVES")
OPERATIONS = 25  # of a life

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE = [torch.int32, torch.int64, torch.uint8]
SHAPES: list[tuple[int, ...]] = [(0,), (1,), (), (3, 2), (17,), (40, 25), (70_000,)]

Check = Callable[[], None]
Reduce = Callable[[list[Tensor]], Tensor]


@dataclass
class Pending:
    """An operation in flight: functions to poll it and to wait for it, and the right result."""

    what: str
    done: Callable[[], bool]
    wait: Callable[[], Any]
    check: Check


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


class Program:
    """One rank's run of a program."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        self.common, self.own = random.Random(seed), random.Random(f"{seed} {rank}")
        self.rank, self.size = rank, size
        self.at = "the beginning"
        self.number = 0
        self.groups: list[Group] = []
        self.sets: list[Group] = []

    def run(self) -> None:
        for life in range(self.common.randint(1, 3)):
            self.at = f"life {life}"
            with default_group():
                self.live(life)

    def live(self, life: int) -> None:
        has_horovod = self.common.random() < 0.6
        world = list(range(self.size))
        self.groups = [Group(world, dist.group.WORLD, self.rank)]
        self.sets = []
        for _ in range(self.common.randint(0, 3)):
            self.make_group()
        if has_horovod:
            hvd.init()
            self.sets = [Group(world, hvd.global_process_set, self.rank)]
            if self.size > 2:
                self.make_set()
        for step in range(OPERATIONS):
            self.at = f"life {life}, step {step}"
            self.step()
            self.ask()
        for group in (*self.groups, *self.sets):
            self.drain(group)
        if has_horovod and self.common.random() < 0.8:
            hvd.shutdown()
        elif has_horovod:
            dist.barrier()
            hvd.shutdown()

    # --- groups

    def subset(self) -> list[int]:
        return sorted(self.common.sample(range(self.size), self.common.randint(1, self.size)))

    def make_group(self) -> None:
        ranks, options = self.subset(), {}
        if IS_TORCH_2_14 and self.common.random() < 0.3:
            self.common.shuffle(ranks)
            options["sort_ranks"] = False
        handle = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S), **options)
        mine = ranks.index(self.rank) if self.rank in ranks else -1
        self.groups.append(Group(ranks, handle, mine))

    def make_set(self) -> None:
        ranks = self.subset()[: self.size - 1]
        process_set = hvd.add_process_set(ranks)
        mine = ranks.index(self.rank) if self.rank in ranks else -1
        self.sets.append(Group(ranks, process_set, mine))

    def step(self) -> None:
        if len(self.groups) > 1 and self.common.random() < 0.08:
            group = self.groups.pop(self.common.randrange(1, len(self.groups)))
            self.drain(group)
            if group.rank >= 0:
                dist.destroy_process_group(group.handle)
        elif self.common.random() < 0.08:
            self.make_group()
        elif self.sets and self.common.random() < 0.35:
            self.operate(self.common.choice(self.sets), self.common.choice(SETS_OPERATIONS))
        else:
            self.operate(self.common.choice(self.groups), self.common.choice(GROUPS_OPERATIONS))

    def operate(self, group: Group, begin: Callable[[Draw, Group], list[Pending]]) -> None:
        self.number += 1
        draw = Draw(self.common.getrandbits(32), self.number, self.own)
        if group.rank < 0:
            return
        self.at += f": {begin.__name__} in {group.ranks}"
        for pending in begin(draw, group):
            if draw.is_async:
                group.pending.append(pending)
            else:
                pending.wait()
                pending.check()

    # --- waiting

    def ask(self) -> None:
        """Poll for, or wait for, some operations; each rank chooses by itself."""
        for group in (*self.groups, *self.sets):
            while group.pending and self.own.random() < 0.4:
                pending = self.own.choice(group.pending)
                if self.own.random() < 0.5:
                    if pending.done():
                        self.end(group, pending)
                else:
                    self.end(group, pending)

    def drain(self, group: Group) -> None:
        while group.pending:
            self.end(group, self.own.choice(group.pending))

    def end(self, group: Group, pending: Pending) -> None:
        group.pending.remove(pending)
        pending.wait()
        try:
            pending.check()
        except AssertionError as error:
            raise AssertionError(f"{pending.what} in {group.ranks}: {error}") from error


class Draw:
    """The draw for one operation: the same on all ranks, whether or not they are members."""

    def __init__(self, seed: int, number: int, own: random.Random) -> None:
        self.random, self.own = random.Random(seed), own
        self.number = number
        self.is_async = self.random.random() < 0.6
        self.shape = self.random.choice(SHAPES)
        self.seed = seed

    def values(self, rank: int, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return the tensor of a rank: from 0 to 3."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * rank)
        chosen = self.shape if shape is None else shape
        return torch.randint(0, 4, chosen, generator=generator).to(dtype)

    def all_values(self, group: Group, dtype: torch.dtype) -> list[Tensor]:
        return [self.values(rank, dtype) for rank in group.ranks]

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return a copy, which may have gaps between its elements."""
        if self.own.random() < 0.25:
            return torch.stack([tensor, tensor], -1)[..., 0]
        return tensor.clone()


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.equal(got, want), (got, want)


def pending(what: str, work: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> Pending:
    """Return an operation of torch.distributed; `work`: None for a blocking one."""

    def check() -> None:
        for got, want in pairs:
            same(got, want)

    if work is None:
        return Pending(what, lambda: True, lambda: None, check)
    return Pending(what, work.is_completed, work.wait, check)


# --- torch.distributed


def reduction(draw: Draw, group: Group) -> tuple[Any, torch.dtype, Reduce]:
    """Return an operator, a dtype, and how values of all ranks are reduced."""

    def folded(fold: Callable[[Tensor, Tensor], Tensor]) -> Reduce:
        def reduce(parts: list[Tensor]) -> Tensor:
            result = parts[0]
            for part in parts[1:]:
                result = fold(result, part)
            return result

        return reduce

    name = draw.random.choice(
        ["SUM", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL", "BOOL"]
    )
    dtype = draw.random.choice(FLOATS + WHOLE)
    add = folded(torch.add)
    if name == "BOOL":
        return dist.ReduceOp.SUM, torch.bool, folded(torch.logical_or)
    if name in ("BAND", "BOR", "BXOR"):
        dtype = draw.random.choice(WHOLE)
        bitwise = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
        return getattr(dist.ReduceOp, name), dtype, folded(bitwise[name])
    if name == "AVG":  # the inputs are multiples of the size, so this is exact
        return dist.ReduceOp.AVG, dtype, lambda parts: add([part // group.size for part in parts])
    if name == "PREMUL":
        own = dist._make_nccl_premul_sum(2.0**group.rank)
        return own, dtype, lambda parts: add([part * 2**r for r, part in enumerate(parts)])
    fold = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
    return getattr(dist.ReduceOp, name), dtype, folded(fold[name])


def scaled(op: Any, group: Group, values: list[Tensor]) -> list[Tensor]:
    return [value * group.size for value in values] if op == dist.ReduceOp.AVG else values


def all_reduce(draw: Draw, group: Group) -> list[Pending]:
    op, dtype, reduced = reduction(draw, group)
    values = scaled(op, group, draw.all_values(group, dtype))
    tensor = draw.laid_out(values[group.rank])
    work = dist.all_reduce(tensor, op, group=group.handle, async_op=draw.is_async)
    return [pending("all_reduce", work, [(tensor, reduced(values))])]


def all_reduce_twice(draw: Draw, group: Group) -> list[Pending]:
    values = draw.all_values(group, torch.float64)
    tensor = draw.laid_out(values[group.rank])
    works = [dist.all_reduce(tensor, group=group.handle, async_op=draw.is_async) for _ in "12"]
    want = group.size * torch.stack(values).sum(0)

    def wait() -> None:
        for work in works:
            if work is not None:
                work.wait()

    return [Pending("twice", lambda: False, wait, lambda: same(tensor, want))]


def broadcast(draw: Draw, group: Group) -> list[Pending]:
    dtype, root = draw.random.choice(FLOATS + WHOLE), draw.random.choice(group.ranks)
    tensor = draw.laid_out(draw.values(dist.get_rank(), dtype))
    work = dist.broadcast(tensor, root, group=group.handle, async_op=draw.is_async)
    return [pending("broadcast", work, [(tensor, draw.values(root, dtype))])]


def reduce(draw: Draw, group: Group) -> list[Pending]:
    op, dtype, reduced = reduction(draw, group)
    root = draw.random.choice(group.ranks)
    values = scaled(op, group, draw.all_values(group, dtype))
    tensor = draw.laid_out(values[group.rank])
    work = dist.reduce(tensor, root, op, group=group.handle, async_op=draw.is_async)
    want = reduced(values) if root == dist.get_rank() else values[group.rank]
    return [pending("reduce", work, [(tensor, want)])]


def all_gather(draw: Draw, group: Group) -> list[Pending]:
    dtype = draw.random.choice([*FLOATS, *WHOLE, torch.bool])
    values = draw.all_values(group, dtype)
    own = draw.laid_out(values[group.rank])
    if draw.random.random() < 0.5:
        parts = [draw.laid_out(torch.zeros_like(own)) for _ in group.ranks]
        work = dist.all_gather(parts, own, group=group.handle, async_op=draw.is_async)
        return [pending("all_gather", work, list(zip(parts, values, strict=True)))]
    whole = torch.zeros((group.size, *draw.shape), dtype=dtype)
    work = dist.all_gather_into_tensor(whole, own, group=group.handle, async_op=draw.is_async)
    return [pending("all_gather_into_tensor", work, [(whole, torch.stack(values))])]


def gather(draw: Draw, group: Group) -> list[Pending]:
    dtype, root = draw.random.choice(FLOATS + WHOLE), draw.random.choice(group.ranks)
    values, is_root = draw.all_values(group, dtype), root == dist.get_rank()
    own = draw.laid_out(values[group.rank])
    parts = [draw.laid_out(torch.zeros_like(own)) for _ in group.ranks] if is_root else None
    work = dist.gather(own, parts, root, group=group.handle, async_op=draw.is_async)
    return [pending("gather", work, list(zip(parts or [], values, strict=is_root)))]


def scatter(draw: Draw, group: Group) -> list[Pending]:
    dtype, root = draw.random.choice(FLOATS + WHOLE), draw.random.choice(group.ranks)
    values = draw.all_values(group, dtype)
    tensor = draw.laid_out(torch.zeros(draw.shape, dtype=dtype))
    parts = [draw.laid_out(value) for value in values] if root == dist.get_rank() else None
    work = dist.scatter(tensor, parts, root, group=group.handle, async_op=draw.is_async)
    return [pending("scatter", work, [(tensor, values[group.rank])])]


def reduce_scatter(draw: Draw, group: Group) -> list[Pending]:
    op, dtype, reduced = reduction(draw, group)
    shape = (group.size, *draw.shape)
    values = scaled(op, group, [draw.values(rank, dtype, shape) for rank in group.ranks])
    output = draw.laid_out(torch.zeros(draw.shape, dtype=dtype))
    own = draw.laid_out(values[group.rank])
    call, given = dist.reduce_scatter, list(own.unbind(0))
    if draw.random.random() < 0.5:
        call, given = dist.reduce_scatter_tensor, own.flatten(0, min(1, own.dim() - 1))
    work = call(output, given, op, group=group.handle, async_op=draw.is_async)
    return [pending("reduce_scatter", work, [(output, reduced(values)[group.rank])])]


def all_to_all(draw: Draw, group: Group) -> list[Pending]:
    dtype = draw.random.choice(FLOATS + WHOLE)
    splits = [[draw.random.randint(0, 4) for _ in group.ranks] for _ in group.ranks]
    rows = [draw.values(r, dtype, (sum(splits[i]), 3)) for i, r in enumerate(group.ranks)]
    parts = [part.split(splits[i]) for i, part in enumerate(rows)]
    want = [parts[i][group.rank] for i in range(group.size)]
    own = draw.laid_out(rows[group.rank])
    got = [torch.zeros_like(part) for part in want]
    if draw.random.random() < 0.5:
        given = list(own.split(splits[group.rank]))
        work = dist.all_to_all(got, given, group=group.handle, async_op=draw.is_async)
        return [pending("all_to_all", work, list(zip(got, want, strict=True)))]
    output = torch.zeros_like(torch.cat(want))
    work = dist.all_to_all_single(
        output,
        own,
        [len(part) for part in want],
        splits[group.rank],
        group=group.handle,
        async_op=draw.is_async,
    )
    return [pending("all_to_all_single", work, [(output, torch.cat(want))])]


def shift(draw: Draw, group: Group) -> list[Pending]:
    """Messages around the ring."""
    if group.size == 1:
        return []
    dtype, tag = draw.random.choice(FLOATS + WHOLE), draw.random.randint(0, 2)
    following = group.ranks[(group.rank + 1) % group.size]
    previous = group.ranks[group.rank - 1]
    sent = draw.laid_out(draw.values(dist.get_rank(), dtype))
    got = draw.laid_out(torch.zeros(draw.shape, dtype=dtype))
    receive = dist.irecv(got, previous, group=group.handle, tag=tag)
    send = dist.isend(sent, following, group=group.handle, tag=tag)
    return [
        pending("isend", send, []),
        pending("irecv", receive, [(got, draw.values(previous, dtype))]),
    ]


def barrier(draw: Draw, group: Group) -> list[Pending]:
    return [pending("barrier", dist.barrier(group=group.handle, async_op=draw.is_async), [])]


def objects(draw: Draw, group: Group) -> list[Pending]:
    got: list[Any] = [None] * group.size
    dist.all_gather_object(got, {"rank": dist.get_rank(), "n": draw.number}, group=group.handle)
    assert got == [{"rank": rank, "n": draw.number} for rank in group.ranks], got
    return []


def callback(draw: Draw, group: Group) -> list[Pending]:
    """A future whose callback is part of the result."""
    values = draw.all_values(group, torch.float32)
    tensor = draw.laid_out(values[group.rank])
    work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    assert work is not None
    future = work.get_future().then(lambda done: done.value()[0] + 1)
    want = torch.stack(values).sum(0)
    return [Pending("callback", future.done, future.wait, lambda: same(future.value(), want + 1))]


GROUPS_OPERATIONS = [
    *[all_reduce] * 4,
    all_reduce_twice,
    broadcast,
    reduce,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    all_to_all,
    shift,
    barrier,
    objects,
    callback,
]

# --- Horovod's names


def of_horovod(what: str, handle: int, check: Callable[[Any], None]) -> Pending:
    result: list[Any] = []
    return Pending(
        what,
        lambda: hvd.poll(handle),
        lambda: result.append(hvd.synchronize(handle)),
        lambda: check(result[0]),
    )


def hvd_allreduces(draw: Draw, group: Group) -> list[Pending]:
    """Several allreduces by name: each rank submits them in its own order."""
    begun: list[Pending] = []
    indices = list(range(draw.random.randint(1, 4)))
    draw.is_async = True
    kinds = [draw.random.choice(["Sum", "Average", "Min", "Max"]) for _ in indices]
    dtypes = [draw.random.choice(FLOATS + WHOLE) for _ in indices]
    draw.own.shuffle(indices)
    for index in indices:
        values = draw.all_values(group, dtypes[index])
        stack = torch.stack(values)
        if kinds[index] == "Average":
            values = [value * group.size for value in values]
        want = {
            "Sum": stack.sum(0, dtype=stack.dtype),
            "Average": stack.sum(0, dtype=stack.dtype),
            "Min": stack.amin(0),
            "Max": stack.amax(0),
        }[kinds[index]]
        tensor = draw.laid_out(values[group.rank])
        call = hvd.allreduce_async_ if draw.own.random() < 0.5 else hvd.allreduce_async
        handle = call(
            tensor,
            op=getattr(hvd, kinds[index]),
            name=f"{draw.number}.{index}",
            process_set=group.handle,
        )
        what = f"hvd.allreduce {kinds[index]}"
        begun.append(of_horovod(what, handle, lambda got, want=want: same(got, want)))
    return begun


def hvd_allgather(draw: Draw, group: Group) -> list[Pending]:
    dtype = draw.random.choice(FLOATS + WHOLE)
    values = [draw.values(rank, dtype, (1 + rank, 3)) for rank in group.ranks]
    own = draw.laid_out(values[group.rank])
    handle = hvd.allgather_async(own, name=f"{draw.number}", process_set=group.handle)
    draw.is_async = True
    return [of_horovod("hvd.allgather", handle, lambda got: same(got, torch.cat(values)))]


def hvd_broadcast(draw: Draw, group: Group) -> list[Pending]:
    dtype, root = draw.random.choice(FLOATS + WHOLE), draw.random.choice(group.ranks)
    tensor = draw.laid_out(draw.values(group.ranks[group.rank], dtype))
    handle = hvd.broadcast_async(tensor, root, name=f"{draw.number}", process_set=group.handle)
    draw.is_async = True
    want = draw.values(root, dtype)
    return [of_horovod("hvd.broadcast", handle, lambda got: same(got, want))]


def hvd_grouped(draw: Draw, group: Group) -> list[Pending]:
    values = draw.all_values(group, torch.float32)
    tensors = [draw.laid_out(values[group.rank]) + index for index in range(3)]
    got = hvd.grouped_allreduce(
        tensors, op=hvd.Sum, name=f"{draw.number}", process_set=group.handle
    )
    for index, tensor in enumerate(got):
        same(tensor, torch.stack(values).sum(0) + index * group.size)
    return []


SETS_OPERATIONS = [*[hvd_allreduces] * 3, hvd_allgather, hvd_broadcast, hvd_grouped]

# --- running


def run_program(seed: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    program = Program(seed, rank, size)
    try:
        program.run()
    except Exception as error:
        raise AssertionError(f"{program.at}: {error}") from error


@pytest.mark.parametrize(
    ("transport", "size"), [("shm", 2), ("shm", 3), slow("shm", 4), slow("tcp", 2), ("tcp", 3)]
)
def test_random_collectives(transport: str, size: int, full: bool) -> None:
    first = 1000 * size + (500 if transport == "tcp" else 0)
    seeds = range(first, first + (ALL_PROGRAMS if full else PROGRAMS))
    for seed in [int(ALONE)] if ALONE else seeds:
        try:
            run(
                run_program,
                size,
                args=(seed,),
                transport=transport,
                initialized=False,
                kind="c10d and hvd",
            )
        except RanksFailed as failure:
            raise RanksFailed(
                f"RANDOM_COLLECTIVES={seed} with {size} ranks over {transport}: {failure}"
            ) from None
