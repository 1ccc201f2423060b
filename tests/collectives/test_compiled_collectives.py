# SPDX-License-Identifier: Apache-2.0
"""The collectives in full graphs of torch.compile: results, derivatives, order, errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from on_ranks import on_ranks
from pool import run
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import torch_ring as hvd
from torch_ring.world import current

Function = Callable[[Tensor], Tensor]


def functions() -> dict[str, Function]:
    """Return a function for each collective, and each of its arguments that matter to a graph."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())] if hvd.size() > 1 else []
    alone = sets[hvd.rank()] if sets else hvd.global_process_set
    size, last = hvd.size(), hvd.size() - 1
    splits = [1] * size

    def inplace(x: Tensor) -> Tensor:
        copy = (2 * x).detach()
        hvd.allreduce_(copy, op=hvd.Sum)
        hvd.broadcast_(copy, root_rank=last)
        return x * copy

    def split(x: Tensor) -> Tensor:
        rows, counts = hvd.alltoall(x[: size + 1] * 3, splits)
        return rows * counts.sum()

    return {
        "allreduce": lambda x: hvd.allreduce(x * 2),
        "sum": lambda x: hvd.allreduce(x * 2, op=hvd.Sum, prescale_factor=0.5, name="sum"),
        "compressed": lambda x: hvd.allreduce(x * 2, compression=hvd.Compression.bf16),
        "alone": lambda x: hvd.allreduce(x * 2, process_set=alone),
        "broadcast": lambda x: hvd.broadcast(x * 2, root_rank=last),
        "allgather": lambda x: hvd.allgather(x[: hvd.rank() + 1] * 2) ** 2,
        "allgather_flat": lambda x: hvd.allgather(x.flatten()[: hvd.rank() + 1] * 2) ** 2,
        "allgather_sum": lambda x: hvd.allgather(x * 2, grad_op=hvd.Sum) ** 2,
        "reducescatter": lambda x: hvd.reducescatter(x * 2, op=hvd.Sum, postscale_factor=0.5) ** 2,
        "alltoall": lambda x: hvd.alltoall(x[: 2 * size] * 2) ** 2,
        "alltoall_splits": split,
        "inplace": inplace,
    }


def gradient_of(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    result = function(x)
    result.sin().sum().backward()
    assert x.grad is not None
    return result.detach(), x.grad


def compare_with_eager(backend: str) -> None:
    """A compiled function has the results and gradients of the same function as it is."""
    torch.manual_seed(hvd.rank())
    x = torch.randn(7, 3)
    for name, function in functions().items():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for mine, theirs in zip(gradient_of(compiled, x), gradient_of(function, x), strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")
        if name in ("allgather", "inplace"):  # the operators are those of the other graph
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), function(x))


COMPILING_S = 300  # on a busy machine, for all functions


def test_have_the_results_and_gradients_of_eager_functions() -> None:
    run(compare_with_eager, 2, args=("aot_eager",), deadline_s=COMPILING_S)


@pytest.mark.weekly
def test_inductor_compiles_them() -> None:
    env = {"TORCH_RING_TIMEOUT": "240"}  # a rank may compile for long while another one waits
    run(compare_with_eager, 2, args=("inductor",), env=env, deadline_s=COMPILING_S)


@on_ranks(2)
def test_keep_their_order() -> None:
    """A compiled rank and one that is not call the same collectives, also without a use of them."""

    def step(x: Tensor) -> Tensor:
        hvd.allreduce(x, op=hvd.Sum)  # its result is not used
        first, second = hvd.allreduce(x, op=hvd.Max), hvd.allreduce(x, op=hvd.Max)  # alike
        hvd.broadcast_(torch.zeros_like(x), root_rank=0)
        return first + second * hvd.allreduce(x * 2, op=hvd.Min)

    function = torch.compile(step, backend="aot_eager", fullgraph=True) if hvd.rank() == 0 else step
    x = torch.full((3,), 1.0 + hvd.rank())
    assert function(x).tolist() == [hvd.size() + 2.0 * hvd.size()] * 3


@on_ranks(2)
def test_raise_the_errors_of_an_eager_call() -> None:
    """Errors are those of an eager call, on all ranks, and the next call works."""
    function = torch.compile(hvd.allreduce, backend="aot_eager", fullgraph=True)
    with pytest.raises(hvd.MismatchError, match=r"\[2\].*\[3\]"):
        function(torch.ones(2 + hvd.rank()))
    assert function(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(Exception, match="splits must be integers"):
        torch.compile(hvd.alltoall, backend="aot_eager")(torch.ones(3), [1.7, 1.3])
    with pytest.raises(ValueError, match="do not divide among 2 ranks"):
        torch.compile(hvd.alltoall, backend="aot_eager", fullgraph=True)(torch.ones(3))


@on_ranks(3)
def test_follow_the_world() -> None:
    """A function is compiled anew for another process set or world, never run with another's."""
    pair = hvd.add_process_set([0, 1])

    def scatter(x: Tensor) -> Tensor:
        return hvd.reducescatter(x, op=hvd.Sum, process_set=pair)

    compiled = torch.compile(scatter, backend="aot_eager", fullgraph=True)
    x = torch.arange(6.0)
    if hvd.rank() < 2:
        assert compiled(x).tolist() == [[0, 2, 4], [6, 8, 10]][hvd.rank()]
    hvd.remove_process_set(pair)
    if hvd.rank() < 2:
        with pytest.raises(ValueError, match=r"no longer there: call torch.compiler.reset\(\)"):
            compiled(x)
    copied = torch.compile(lambda y: hvd.broadcast(y * 2, 0), backend="aot_eager", fullgraph=True)
    assert gradient_of(copied, x)[1].eq(0).all() == (hvd.rank() != 0)
    of_old_world = copied(x.clone().requires_grad_())
    old = hvd.rank()
    hvd.shutdown()
    hvd.init([old])  # each rank alone
    with pytest.raises(ValueError, match=r"no longer there: call torch.compiler.reset\(\)"):
        of_old_world.sum().backward()
    assert not gradient_of(copied, x)[1].eq(0).any()
    hvd.shutdown()
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    if hvd.rank() != 1:
        assert compiled(x).tolist() == [[0, 2, 4], [6, 8, 10]][hvd.rank() // 2]


@on_ranks(3)
def test_torch_func_has_their_derivatives() -> None:
    """torch.func has the derivatives of autograd, of first and of second order."""
    size = 3
    torch.manual_seed(hvd.rank())
    x = torch.randn(2 * size, 3, dtype=torch.float64)
    for function in (
        hvd.allreduce,
        lambda y: hvd.broadcast(y, 0),
        lambda y: hvd.allgather(y[: hvd.rank() + 1]),
        lambda y: hvd.alltoall(y, [1] * size)[0],
        hvd.reducescatter,
        lambda y: hvd.grouped_allreduce([y, y * 2])[1],
        lambda y: hvd.grouped_allgather([y, y * 2])[1],
        lambda y: hvd.grouped_reducescatter([y, y * 2])[1],
    ):

        def loss(y: Tensor, function: Function = function) -> Tensor:
            return function(y.square()).sin().sum()

        first = torch.func.grad(loss)
        second = torch.func.grad(lambda y, first=first: first(y).square().sum())
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        (curvature,) = torch.autograd.grad(gradient.square().sum(), leaf)
        torch.testing.assert_close(first(x), gradient)
        torch.testing.assert_close(second(x), curvature)


@on_ranks(1)
def test_refuse_forward_mode_and_vmap() -> None:
    operator = torch.ops.torch_ring.allreduce
    x = torch.ones(2)

    def tangent(y: Tensor) -> Tensor:
        with forward_ad.dual_level():
            result = hvd.allreduce(forward_ad.make_dual(y, y))
            return forward_ad.unpack_dual(result).tangent

    with pytest.raises(ValueError, match=r"do not work in torch\.vmap"):
        torch.func.vmap(lambda y: operator(y, "", int(hvd.Sum), 1.0, 1.0, token()))(x)
    for function in (
        lambda: tangent(x),
        lambda: torch.compile(tangent, backend="aot_eager")(x),
        lambda: torch.func.jvp(
            lambda y: operator(y, "", int(hvd.Sum), 1.0, 1.0, token()), (x,), (x,)
        ),
        lambda: torch.func.jvp(hvd.allreduce, (x,), (x,)),
    ):
        with pytest.raises(ValueError, match="forward-mode derivatives are not supported"):
            function()


def token() -> str:
    """The text of all ranks (`operators._token_of`)."""
    return f"0 {current.world().token}"


@on_ranks(2)
def test_a_checkpoint_inside() -> None:
    """A checkpoint in a compiled function ends the graph, and has the right derivatives."""
    torch.manual_seed(hvd.rank())

    def step(y: Tensor) -> Tensor:
        inner = lambda z: hvd.allreduce(z.sin(), op=hvd.Sum).cos()  # noqa: E731
        return checkpoint(inner, y, use_reentrant=False) * 2

    x = torch.randn(4)
    compiled = torch.compile(step, backend="aot_eager")
    for mine, theirs in zip(gradient_of(compiled, x), gradient_of(step, x), strict=True):
        torch.testing.assert_close(mine, theirs)
