# SPDX-License-Identifier: Apache-2.0
"""Tensors without memory of their own, wrappers and traced tensors: an error, no crash."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from closed_form import every_call
from on_ranks import on_ranks
from pool import error_of, expect_error
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

import torch_ring as hvd
from tests.support.groups import on_ring


class Wrapper(Tensor):
    """A tensor whose values are in another one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        wrapper: Wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.empty_like.default):
            return Wrapper(args[0].inner)
        raise NotImplementedError(f"{func}")


@on_ranks(2)
def test_wrappers_are_refused() -> None:
    words = "a Wrapper, which has no memory of its own: give the tensor that it wraps"
    for call in every_call(Wrapper(torch.ones(4, 3))).values():
        expect_error("InvalidArgumentError", words, call)
    fake = FakeTensorMode().from_tensor(torch.ones(4, 3))
    for call in every_call(fake).values():
        assert error_of(call)[0] in ("InvalidArgumentError", "AssertionError", "RuntimeError")
    assert "a FakeTensor, which has no memory" in error_of(lambda: hvd.allreduce_(fake))[1]
    traced = torch._to_functional_tensor(torch.ones(4, 3))
    assert "has no memory: is this in" in error_of(lambda: hvd.allreduce_(traced))[1]
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


class Wraps(torch.autograd.Function):
    """The identity, whose gradient is a wrapper."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return Wrapper(gradient)


@on_ranks(2)
def test_a_gradient_that_is_a_wrapper_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    words = "the gradient of 'weight' is a Wrapper, which has no memory of its own"
    expect_error("ValueError", words, Wraps.apply(model.weight).sum().backward)
    del optimizer


def refuse_dtensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hvd.init()
    tensor = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])
    for call in every_call(tensor).values():
        text = expect_error("InvalidArgumentError", "a DTensor, which has no memory of its", call)
        assert "to_local()" in text
    state = distribute_module(nn.Linear(3, 2), mesh).state_dict()
    expect_error("InvalidArgumentError", "DTensor", lambda: hvd.broadcast_parameters(state, 0))
    assert hvd.allreduce(tensor.to_local(), op=hvd.Sum).sum() == 24
    hvd.shutdown()


def test_dtensors_are_refused() -> None:
    on_ring(refuse_dtensors, 2, is_fresh=True)


def refuse_in_group() -> None:
    wrapper, plain = Wrapper(torch.ones(4, 3)), torch.ones(4, 3)
    for call in (
        lambda: dist.all_reduce(wrapper),
        lambda: dist.broadcast(wrapper, 0),
        lambda: dist.all_gather([plain, wrapper], plain),
        lambda: dist.all_gather_into_tensor(torch.ones(8, 3), wrapper),
        lambda: dist.reduce_scatter_tensor(torch.ones(2, 3), wrapper),
        lambda: dist.all_to_all_single(wrapper, plain),
        lambda: dist.reduce(wrapper, 0),
        lambda: dist.send(wrapper, 1 - dist.get_rank()),
    ):
        assert error_of(call)[0] != "nothing"
    dist.all_reduce(plain)
    assert plain.sum() == 24


def test_wrappers_are_refused_in_a_group() -> None:
    on_ring(refuse_in_group, 2)
