# SPDX-License-Identifier: Apache-2.0
"""recorded: a collective with a derivative, which is another collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ring._C import Engine, Work
from torch_ring.collectives.handle import GroupHandle

__all__ = ["Derivative", "recorded"]

Derivative = Callable[[Sequence[Tensor], Sequence[list[int]]], Sequence[Tensor]]
"""The gradients of tensors, from those of their results and the rows received from each rank.

All ranks call it. It calls collectives that have derivatives themselves.
"""


def recorded(
    engine: Engine,
    collective: str,
    tensors: Sequence[Tensor],
    name: str | None,
    derivative: Derivative,
    *arguments: Any,
    is_group: bool = False,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a collective, for autograd to record.

    Args:
        engine: of the process set.
        collective: as for ``Engine.submit``.
        tensors: one of this rank, or those of a group.
        name: as for ``Engine.submit``.
        derivative: the derivative.
        *arguments: operator and factors, as for ``Engine.submit``.
        is_group: whether the tensors are a group.
        **options: as for ``Engine.submit``.

    Returns:
        The results; and for each the number of rows received from each rank, int64, which is empty
        but for an allgather or alltoall.
    """

    def submit(*sent: Tensor) -> Sequence[Work]:
        if is_group:
            return engine.submit_group(collective, sent, (), name, True, *arguments, **options)
        return [engine.submit(collective, sent[0], None, name, True, *arguments, **options)]

    outputs = _Recorded.apply(submit, derivative, *tensors)
    return list(outputs[: len(tensors)]), list(outputs[len(tensors) :])


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        submit: Callable[..., Sequence[Work]], _: Derivative, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        works = submit(*tensors)
        return *GroupHandle(works).wait(), *map(_received, works)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.derivative, *tensors = inputs
        received = output[len(tensors) :]
        ctx.mark_non_differentiable(*received)
        ctx.save_for_backward(*received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        received = [each.tolist() for each in ctx.saved_tensors]
        return None, None, *ctx.derivative(gradients[: len(received)], received)


def _received(work: Work) -> Tensor:
    return torch.tensor(work.received_splits(), dtype=torch.int64, device="cpu")
