"""The collectives as operators of torch, ``torch.ops.torch_ring.*``, for ``torch.compile``.

The functions of this package call them while torch.compile traces: a graph then goes on through
them (``fullgraph=True``), with derivatives. They are *ordered*: torch neither drops, repeats nor
reorders them, so ranks whose graphs differ still call them in the order of their programs.

An operator gets its process set as a text, which is a constant of the graph (`_token_of`). Its
results are those of the function of the same name. The number of rows that other ranks send is an
unbacked size of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import SymInt, Tensor
from torch.autograd import forward_ad

from torch_ring._C import Engine, empty_result, empty_result_like
from torch_ring.collectives.reduce_op import Average, Sum
from torch_ring.errors import InvalidArgumentError
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, global_process_set, membership

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "are_traced",
    "broadcast",
    "of_root",
    "reducescatter",
    "rows_for_each",
]


F = TypeVar("F", bound=Callable[..., Any])


def _constant(function: F) -> F:
    """Make the result of a function a constant of the graph."""
    marked: F = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    return marked


def _fake(op: Any) -> Callable[[F], F]:
    """Make a function the operator on tensors without data."""

    def register(function: F) -> F:
        op.register_fake(function)
        return function

    return register


# torch.compile compiles a function anew in another world, whose token differs.


def _token_of(process_set: ProcessSet) -> str:
    """Return the text of a process set; "" for all ranks, whatever the world."""
    if process_set is global_process_set:
        return ""
    token = current.world().token
    return f"{_number_of(process_set, token)} {token}"


@_constant
def _number_of(process_set: ProcessSet, token: str) -> int:  # noqa: ARG001
    return membership(process_set).number


@_constant
def _rank_in(process_set: ProcessSet, token: str) -> int:  # noqa: ARG001
    return process_set.rank()


@_constant
def _size_of(process_set: ProcessSet, token: str) -> int:  # noqa: ARG001
    return process_set.size()


def are_traced() -> bool:
    """Return whether torch.compile can trace the operators here: not inside ``torch.func``."""
    return not torch._C._are_functorch_transforms_active()


_STALE = "a compiled function {}: call torch.compiler.reset()"


def _set_of(token: str) -> tuple[Engine, Sequence[int]]:
    """Return the engine and the ranks of a process set.

    Raises:
        InvalidArgumentError: the set has been removed, or its world has ended; or derivatives of
            forward mode are asked for, which torch would take for zero.
    """
    if forward_ad._current_level >= 0:
        raise InvalidArgumentError("forward-mode derivatives are not supported")
    world = current.world()
    if not token:
        return current.engine(), range(world.size)
    number, _, of_world = token.partition(" ")
    for record in world.process_sets.records:
        if record.number == int(number) and world.token == of_world:
            return record.engine(), record.ranks
    raise InvalidArgumentError(_STALE.format("uses a process set that is no longer there"))


def _ordered(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator that torch keeps in the order of the program."""
    name, brace, arguments = schema.partition("(")
    full_name = f"torch_ring::{name}"

    def define(function: Callable[..., Any]) -> Any:
        defined = torch.library.custom_op(
            full_name, function, mutates_args=(), schema=brace + arguments
        )
        _register_effect(full_name)
        return defined

    return define


def _register_effect(name: str) -> None:
    from torch._higher_order_ops import effects

    effects._register_effectful_op(name, effects._EffectType.ORDERED)


# --- the operators, and the functions that the others call while torch.compile traces


@_ordered(
    "allreduce(Tensor tensor, str name, int op, float prescale, float postscale, str process_set)"
    " -> Tensor"
)
def _allreduce(
    tensor: Tensor, name: str, op: int, prescale: float, postscale: float, process_set: str
) -> Tensor:
    engine, _ = _set_of(process_set)
    return engine.allreduce_and_wait(tensor, None, name, op, prescale, postscale)


@_fake(_allreduce)
def _(tensor: Tensor, *_: object) -> Tensor:
    return torch.empty_like(tensor)


def _keep_allreduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.arguments = inputs[2:]


def _allreduce_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _allreduce(gradient, "", *ctx.arguments), None, None, None, None, None


_allreduce.register_autograd(_allreduce_gradient, setup_context=_keep_allreduce)


def allreduce(
    tensor: Tensor,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Tensor:
    """Return the reduction of `tensor`."""
    token = _token_of(process_set)
    reduced: Tensor = _allreduce(
        tensor, name or "", int(op), float(prescale), float(postscale), token
    )
    return reduced


@_ordered("broadcast(Tensor tensor, str name, int root_rank, str process_set) -> Tensor")
def _broadcast(tensor: Tensor, name: str, root_rank: int, process_set: str) -> Tensor:
    engine, ranks = _set_of(process_set)
    if root_rank not in ranks:
        raise InvalidArgumentError(
            f"root_rank={root_rank} is not in the process set {list(ranks)}: give one of these"
        )
    output = empty_result_like(tensor)
    return engine.broadcast(tensor, output, ranks.index(root_rank), name, True).wait()


@_fake(_broadcast)
def _(tensor: Tensor, *_: object) -> Tensor:
    return torch.empty_like(tensor)


def _keep_broadcast(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, _, ctx.root_rank, ctx.process_set = inputs


def _broadcast_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    averaged = _allreduce(gradient, "", int(Average), 1.0, 1.0, ctx.process_set)
    return of_root(averaged, is_root=current.rank() == ctx.root_rank), None, None, None


def of_root(averaged: Tensor, *, is_root: bool) -> Tensor:
    """Return a gradient for the root, zeros for others: all ranks call its own derivatives."""
    if is_root:
        return averaged
    return torch.where(torch.zeros_like(averaged, dtype=torch.bool), averaged, 0.0)


_broadcast.register_autograd(_broadcast_gradient, setup_context=_keep_broadcast)


def broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    """Return the root's tensor."""
    result: Tensor = _broadcast(tensor, name or "", root_rank, _token_of(process_set))
    return result


# `rows`: the number of rows of the result, where the caller knows it.
@_ordered(
    "allgather(Tensor tensor, str name, int grad_op, str process_set, SymInt? rows)"
    " -> (Tensor, Tensor)"
)
def _allgather(
    tensor: Tensor, name: str, grad_op: int, process_set: str, rows: int | None
) -> tuple[Tensor, Tensor]:
    """Return the gathered rows, and the number of those of each rank."""
    del grad_op, rows
    work = _set_of(process_set)[0].allgather(tensor, name, True)
    gathered = work.wait()
    return gathered, torch.tensor(work.received_splits(), dtype=torch.int64, device="cpu")


def _with_rows(tensor: Tensor, rows: int | SymInt | None) -> Tensor:
    """Return an empty tensor for rows of `tensor`'s; None: a number that only the call shows."""
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    return tensor.new_empty([rows, *tensor.shape[1:]])


@_fake(_allgather)
def _(
    tensor: Tensor, name: str, grad_op: int, process_set: str, rows: int | SymInt | None
) -> tuple[Tensor, Tensor]:
    del name, grad_op
    size = len(_set_of(process_set)[1])
    return _with_rows(tensor, rows), torch.empty(size, dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "torch_ring::own_rows",
    mutates_args=(),
    schema="(Tensor gathered, Tensor rows, str process_set, SymInt count) -> Tensor",
)
def _own_rows(gathered: Tensor, rows: Tensor, process_set: str, count: int) -> Tensor:
    before = int(rows[: _set_of(process_set)[1].index(current.rank())].sum())
    return gathered[before : before + count].clone()


@_fake(_own_rows)
def _(gathered: Tensor, rows: Tensor, process_set: str, count: int | SymInt) -> Tensor:
    del rows, process_set
    return _with_rows(gathered, count)


def _keep_allgather(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensor, _, ctx.grad_op, ctx.process_set, _ = inputs
    ctx.count = tensor.shape[0]
    ctx.save_for_backward(output[1])


def _allgather_gradient(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (rows,) = ctx.saved_tensors
    reduced = _allreduce(gradient, "", ctx.grad_op, 1.0, 1.0, ctx.process_set)
    return _own_rows(reduced, rows, ctx.process_set, ctx.count), None, None, None, None


_allgather.register_autograd(_allgather_gradient, setup_context=_keep_allgather)


def allgather(tensor: Tensor, name: str | None, process_set: ProcessSet, grad_op: int) -> Tensor:
    """Return the rows of all ranks."""
    gathered: Tensor
    gathered, _ = _allgather(tensor, name or "", int(grad_op), _token_of(process_set), None)
    return gathered


@_ordered(
    "reducescatter(Tensor tensor, str name, int op, float prescale, float postscale,"
    " str process_set, int rank, int size) -> Tensor"
)
def _reducescatter(
    tensor: Tensor,
    name: str,
    op: int,
    prescale: float,
    postscale: float,
    process_set: str,
    rank: int,
    size: int,
) -> Tensor:
    engine, ranks = _set_of(process_set)
    place = ranks.index(current.rank()), len(ranks)
    if place != (rank, size):
        was = f"is of rank {rank} of {size}, and this one is {place[0]} of {place[1]}"
        raise InvalidArgumentError(_STALE.format(was))
    output = empty_result(tensor, [_share(tensor, rank, size), *tensor.shape[1:]])
    return engine.reducescatter(tensor, output, name, op, prescale, postscale, True).wait()


def _share(tensor: Tensor, rank: int, size: int) -> Any:
    """Return the number of this rank's rows of a reducescatter: the first ranks get one more."""
    return (tensor.shape[0] + size - 1 - rank) // size


@_fake(_reducescatter)
def _(
    tensor: Tensor,
    name: str,
    op: int,
    prescale: float,
    postscale: float,
    process_set: str,
    rank: int,
    size: int,
) -> Tensor:
    del name, op, prescale, postscale, process_set
    return _with_rows(tensor, _share(tensor, rank, size))


def _keep_reducescatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    tensor, _, op, prescale, postscale, ctx.process_set, _, size = inputs
    ctx.rows = tensor.shape[0]
    ctx.factor = prescale * postscale * (size if op == Sum else 1)


def _reducescatter_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gathered, _ = _allgather(gradient, "", int(Average), ctx.process_set, ctx.rows)
    return gathered * ctx.factor, *[None] * 7


_reducescatter.register_autograd(_reducescatter_gradient, setup_context=_keep_reducescatter)


def reducescatter(
    tensor: Tensor,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Tensor:
    """Return this rank's rows of the reduction."""
    reduced: Tensor = _reducescatter(
        tensor,
        name or "",
        int(op),
        float(prescale),
        float(postscale),
        _token_of(process_set),
        _rank_in(process_set, current.world().token),
        _size_of(process_set, current.world().token),
    )
    return reduced


# `rows`: the number of rows of the result where the caller knows it; missing ones are zero.
@_ordered(
    "alltoall(Tensor tensor, Tensor? splits, str name, str process_set, SymInt? rows)"
    " -> (Tensor, Tensor)"
)
def _alltoall(
    tensor: Tensor, splits: Tensor | None, name: str, process_set: str, rows: int | None
) -> tuple[Tensor, Tensor]:
    """Return the received rows, and the number of those from each rank."""
    engine, ranks = _set_of(process_set)
    work = engine.alltoall(tensor, rows_for_each(tensor, splits, len(ranks)), name, True)
    received = work.wait()
    if rows is not None and rows > received.shape[0]:
        more = received.new_zeros(rows - received.shape[0], *received.shape[1:])
        received = torch.cat([received, more])
    return received, torch.tensor(work.received_splits(), dtype=torch.int32, device="cpu")


@_fake(_alltoall)
def _(
    tensor: Tensor, splits: Tensor | None, name: str, process_set: str, rows: int | SymInt | None
) -> tuple[Tensor, Tensor]:
    del splits, name
    counts = torch.empty(len(_set_of(process_set)[1]), dtype=torch.int32, device="cpu")
    return _with_rows(tensor, rows), counts


def _keep_alltoall(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensor, _, _, ctx.process_set, _ = inputs
    ctx.rows = tensor.shape[0]
    ctx.save_for_backward(output[1])


def _alltoall_gradient(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (received,) = ctx.saved_tensors
    back, _ = _alltoall(gradient, received, "", ctx.process_set, ctx.rows)
    return back, None, None, None, None


_alltoall.register_autograd(_alltoall_gradient, setup_context=_keep_alltoall)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the received rows; with `splits` also the number of those from each rank."""
    token = _token_of(process_set)
    if splits is not None and not isinstance(splits, Tensor):
        splits = torch.tensor(splits, dtype=torch.int64, device="cpu")
    received, rows = _alltoall(tensor, splits, name or "", token, None)
    return received if splits is None else (received, rows)


def rows_for_each(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    """Return the number of rows of an alltoall for each rank."""
    if splits is None:
        rows = tensor.shape[0] if tensor.dim() > 0 else 0
        if rows % size:
            raise InvalidArgumentError(
                f"alltoall: {rows} rows do not divide among {size} ranks: give splits"
            )
        return [rows // size] * size
    try:
        counts: Any = splits.tolist() if isinstance(splits, Tensor) else splits
        return [operator.index(count) for count in counts]
    except TypeError:
        raise InvalidArgumentError("alltoall: splits must be integers, one for each rank") from None
