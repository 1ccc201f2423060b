# SPDX-License-Identifier: Apache-2.0
"""The collectives as operators of torch, ``torch.ops.torch_ring.*``, for ``torch.compile``.

The functions of this package call them while torch.compile traces: a graph then goes on through
them (``fullgraph=True``), with derivatives. They are *ordered*: torch neither drops, repeats nor
reorders them, so ranks whose graphs differ still call them in the order of their programs.

An operator gets its process set as a text, which is a constant of the graph (`_token_of`). Its
results are those of the function of the same name.

In an allgather or alltoall the call itself shows how many rows others send. torch 2.14 loses such a
size if an ordered operator has two results. So these are two operators: the first moves the data,
and returns the number of rows of each rank; the second returns the data (`_Moved`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import SymInt, Tensor
from torch._higher_order_ops import effects
from torch.autograd import forward_ad

from torch_ring._C import Engine, Work
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


# A torch without this (it is not public) ends its graphs at the collectives.
_HAS_ORDER = hasattr(effects, "_register_effectful_op") and hasattr(effects, "_EffectType")

F = TypeVar("F", bound=Callable[..., Any])


def _constant(function: F) -> F:
    """Make the result of a function a constant of the graph.

    As torch.compiler.assume_constant_result(), which imports the compiler: seconds of each rank.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _fake(op: Any) -> Callable[[F], F]:
    """Make a function the operator on tensors without data."""

    def register(function: F) -> F:
        op.register_fake(function)
        return function

    return register


# torch.compile compiles a function anew in another world, whose token differs.


def _token_of(process_set: ProcessSet) -> str:
    """Return the text of a process set in this world."""
    token = current.world().token
    return f"{_number_of(process_set, token)} {token}"


@_constant
def _number_of(process_set: ProcessSet, token: str) -> int:  # noqa: ARG001
    return 0 if process_set is global_process_set else membership(process_set).number


def are_traced() -> bool:
    """Return whether torch.compile can trace the operators here; otherwise its graph ends.

    It cannot inside ``torch.func`` or in forward mode, whose derivatives it would take for zero,
    and inside another operator's graph, as that of ``torch.utils.checkpoint``: torch 2.14 loses
    the order there, and fails.
    """
    is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return _HAS_ORDER and not (is_transformed or _is_nested())


@_constant
def _is_nested() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return len(InstructionTranslator.current_tx().output.tracers) > 1


def _set_of(token: str) -> tuple[Engine, Sequence[int]]:
    """Return the engine and the ranks of a process set.

    Raises:
        InvalidArgumentError: the set has been removed, or its world has ended; or derivatives of
            forward mode are asked for, which torch would take for zero.
    """
    if forward_ad._current_level >= 0:
        raise InvalidArgumentError("forward-mode derivatives are not supported")
    world = current.world()
    number, _, of_world = token.partition(" ")
    for record in world.process_sets.records if world.token == of_world else ():
        if record.number == int(number):
            return current.engine() if number == "0" else record.engine(), record.ranks
    raise InvalidArgumentError(
        "a compiled function uses a process set that is no longer there: call "
        "torch.compiler.reset()"
    )


def _ordered(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator that torch keeps in the order of the program."""
    name, brace, arguments = schema.partition("(")
    full_name = f"torch_ring::{name}"

    def define(function: Callable[..., Any]) -> Any:
        defined = torch.library.custom_op(
            full_name, function, mutates_args=(), schema=brace + arguments
        )
        defined.register_vmap(_refuse_vmap)
        _register_effect(full_name)
        return defined

    return define


def _refuse_vmap(*_: object) -> NoReturn:
    raise InvalidArgumentError("collectives do not work in torch.vmap")


def _register_effect(name: str) -> None:
    if _HAS_ORDER:
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
    return engine.run("allreduce", tensor, None, name, -1, op, prescale, postscale)


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
    return engine.run("broadcast", tensor, None, name, ranks.index(root_rank))


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


class _Moved:
    """Data that an operator has received, until the next one returns it."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._tickets = itertools.count()

    def keep(self, work: Work) -> Tensor:
        """Keep a result; return the number of rows of each rank, and then its ticket."""
        received = work.wait()
        ticket = next(self._tickets)
        self._kept[ticket] = received
        return torch.tensor([*work.received_splits(), ticket], dtype=torch.int64, device="cpu")

    def take(self, counts: Tensor) -> Tensor:
        """Return the result of these counts."""
        return self._kept.pop(int(counts[-1]))


_moved = _Moved()


def _empty_counts(process_set: str) -> Tensor:
    size = len(_set_of(process_set)[1])
    return torch.empty(size + 1, dtype=torch.int64, device="cpu")


def _empty_rows(tensor: Tensor, rows: int | SymInt | None = None) -> Tensor:
    """Return an empty tensor for rows of `tensor`'s; None: a number that only the call shows."""
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    return tensor.new_empty([rows, *tensor.shape[1:]])


@_ordered("allgather(Tensor tensor, str name, str process_set) -> Tensor")
def _allgather(tensor: Tensor, name: str, process_set: str) -> Tensor:
    engine, _ = _set_of(process_set)
    return _moved.keep(engine.submit("allgather", tensor, None, name, True))


@_fake(_allgather)
def _(tensor: Tensor, name: str, process_set: str) -> Tensor:
    del tensor, name
    return _empty_counts(process_set)


# `tensor`: the sent one, for its derivative.
@_ordered("gathered(Tensor counts, Tensor tensor, int grad_op, str process_set) -> Tensor")
def _gathered(counts: Tensor, tensor: Tensor, grad_op: int, process_set: str) -> Tensor:
    del tensor, grad_op, process_set
    return _moved.take(counts)


@_fake(_gathered)
def _(counts: Tensor, tensor: Tensor, grad_op: int, process_set: str) -> Tensor:
    del counts, grad_op, process_set
    return _empty_rows(tensor)


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    counts, tensor, ctx.grad_op, ctx.process_set = inputs
    ctx.rows = tensor.shape[0]
    ctx.save_for_backward(counts)


def _gathered_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (counts,) = ctx.saved_tensors
    reduced = _allreduce(gradient, "", ctx.grad_op, 1.0, 1.0, ctx.process_set)
    return None, _own_rows(reduced, counts, ctx.process_set, ctx.rows), None, None


_gathered.register_autograd(_gathered_gradient, setup_context=_keep_gathered)


@torch.library.custom_op(
    "torch_ring::own_rows",
    mutates_args=(),
    schema="(Tensor gathered, Tensor counts, str process_set, SymInt rows) -> Tensor",
)
def _own_rows(gathered: Tensor, counts: Tensor, process_set: str, rows: int) -> Tensor:
    before = int(counts[: _set_of(process_set)[1].index(current.rank())].sum())
    return gathered[before : before + rows].clone()


@_fake(_own_rows)
def _(gathered: Tensor, counts: Tensor, process_set: str, rows: int | SymInt) -> Tensor:
    del counts, process_set
    return _empty_rows(gathered, rows)


def allgather(tensor: Tensor, name: str | None, process_set: ProcessSet, grad_op: int) -> Tensor:
    """Return the rows of all ranks."""
    token = _token_of(process_set)
    counts = _allgather(tensor.detach(), name or "", token)
    gathered: Tensor = _gathered(counts, tensor, int(grad_op), token)
    return gathered


@_ordered(
    "reducescatter(Tensor tensor, str name, int op, float prescale, float postscale,"
    " str process_set) -> Tensor"
)
def _reducescatter(
    tensor: Tensor, name: str, op: int, prescale: float, postscale: float, process_set: str
) -> Tensor:
    engine, _ = _set_of(process_set)
    return engine.run("reducescatter", tensor, None, name, -1, op, prescale, postscale)


def _share(tensor: Tensor, ranks: Sequence[int]) -> Any:
    """Return the number of this rank's rows of a reducescatter: the first ranks get one more."""
    return (tensor.shape[0] + len(ranks) - 1 - ranks.index(current.rank())) // len(ranks)


@_fake(_reducescatter)
def _(
    tensor: Tensor, name: str, op: int, prescale: float, postscale: float, process_set: str
) -> Tensor:
    del name, op, prescale, postscale
    return _empty_rows(tensor, _share(tensor, _set_of(process_set)[1]))


@_ordered("allgather_known(Tensor tensor, str process_set, SymInt rows) -> Tensor")
def _allgather_known(tensor: Tensor, process_set: str, rows: int) -> Tensor:
    del rows
    return _set_of(process_set)[0].run("allgather", tensor)


@_fake(_allgather_known)
def _(tensor: Tensor, process_set: str, rows: int | SymInt) -> Tensor:
    del process_set
    return _empty_rows(tensor, rows)


def _keep_reducescatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    tensor, _, op, prescale, postscale, ctx.process_set = inputs
    ctx.rows = tensor.shape[0]
    size = len(_set_of(ctx.process_set)[1])
    ctx.factor = prescale * postscale * (size if op == Sum else 1)


def _reducescatter_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gathered = _allgather_known(gradient, ctx.process_set, ctx.rows)
    return gathered * ctx.factor, *[None] * 5


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
    if tensor.dim() == 0:
        raise InvalidArgumentError("reducescatter: a scalar has no first dimension to scatter")
    token = _token_of(process_set)
    reduced: Tensor = _reducescatter(
        tensor, name or "", int(op), float(prescale), float(postscale), token
    )
    return reduced


@_ordered("alltoall(Tensor tensor, Tensor? splits, str name, str process_set) -> Tensor")
def _alltoall(tensor: Tensor, splits: Tensor | None, name: str, process_set: str) -> Tensor:
    engine, ranks = _set_of(process_set)
    rows = rows_for_each(tensor, splits, len(ranks))
    return _moved.keep(engine.submit("alltoall", tensor, None, name, True, splits=rows))


@_fake(_alltoall)
def _(tensor: Tensor, splits: Tensor | None, name: str, process_set: str) -> Tensor:
    del tensor, splits, name
    return _empty_counts(process_set)


# `tensor`: the sent one, for its derivative.
@_ordered("received(Tensor counts, Tensor tensor, str process_set) -> Tensor")
def _received(counts: Tensor, tensor: Tensor, process_set: str) -> Tensor:
    del tensor, process_set
    return _moved.take(counts)


@_fake(_received)
def _(counts: Tensor, tensor: Tensor, process_set: str) -> Tensor:
    del counts, process_set
    return _empty_rows(tensor)


def _keep_received(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    counts, tensor, ctx.process_set = inputs
    ctx.rows = tensor.shape[0]
    ctx.save_for_backward(counts)


def _received_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (counts,) = ctx.saved_tensors
    return None, _sent_back(gradient, counts, ctx.process_set, ctx.rows), None


_received.register_autograd(_received_gradient, setup_context=_keep_received)


@_ordered("sent_back(Tensor tensor, Tensor counts, str process_set, SymInt rows) -> Tensor")
def _sent_back(tensor: Tensor, counts: Tensor, process_set: str, rows: int) -> Tensor:
    """Return each row of an alltoall to its rank; rows that were not sent are zero."""
    engine, ranks = _set_of(process_set)
    splits = counts[: len(ranks)].tolist()
    back = engine.submit("alltoall", tensor, None, None, True, splits=splits).wait()
    unsent = rows - back.shape[0]
    return torch.cat([back, back.new_zeros(unsent, *back.shape[1:])]) if unsent else back


@_fake(_sent_back)
def _(tensor: Tensor, counts: Tensor, process_set: str, rows: int | SymInt) -> Tensor:
    del counts, process_set
    return _empty_rows(tensor, rows)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the received rows; with `splits` also the number of those from each rank."""
    token = _token_of(process_set)
    if splits is not None and not isinstance(splits, Tensor):
        if not all(isinstance(count, int) for count in splits):
            raise InvalidArgumentError(_NO_SPLITS)
        splits = torch.tensor(splits, dtype=torch.int64, device="cpu")
    counts = _alltoall(tensor.detach(), splits, name or "", token)
    received: Tensor = _received(counts, tensor, token)
    return received if splits is None else (received, counts[:-1].to(torch.int32))


_NO_SPLITS = "alltoall: splits must be integers, one for each rank"


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
        raise InvalidArgumentError(_NO_SPLITS) from None
