# SPDX-License-Identifier: Apache-2.0
"""The parts of parameters that ranks step, as plain data: who steps which elements.

Nothing here communicates. All ranks compute the same plan from the sizes of the parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from torch_ring.collectives.compare import refuse_lazy

__all__ = ["Part", "can_cut", "cut", "flat", "plan_parts", "require_dense"]

_ELEMENTWISE = (
    ASGD, SGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop,
)  # fmt: skip
_BY_TENSOR = (Adafactor, Muon)
_CUT = 1024  # elements: parts begin at whole vectors of a kernel, and at cache lines
_LEAST_CUT = 16  # a tensor smaller than this fraction of a rank's fair part stays in one piece


def can_cut(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may step a part of a tensor; if not, it needs whole tensors.

    Raises:
        ValueError: it cannot step tensors independently.
    """
    cls = type(optimizer)
    kinds: list[Any] = [*_ELEMENTWISE, *_BY_TENSOR]
    step = inspect.unwrap(cls.step)
    found = next((k for k in kinds if issubclass(cls, k) and inspect.unwrap(k.step) is step), None)
    if found is None:
        raise ValueError(
            f"shard_state=True: {cls.__name__} is none of the optimizers that step each tensor by "
            f"itself ({', '.join(sorted(kind.__name__ for kind in kinds))}, and subclasses with "
            "the same step()): wrap it with shard_state=False"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("shard_state=True: a step of differentiable=True cannot be divided")
    return found in _ELEMENTWISE


def require_dense(names: Mapping[Tensor, str]) -> None:
    """Raise ValueError for a parameter whose elements overlap, or do not fill their memory."""
    refuse_lazy((name, parameter) for parameter, name in names.items())
    for parameter, name in names.items():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            raise ValueError(
                f"shard_state=True: '{name}' of shape {list(parameter.shape)} has strides "
                f"{parameter.stride()}, which do not fill its memory: make it contiguous()"
            )


class Part(NamedTuple):
    """The elements [begin, end) of a parameter, in the order of memory, that a rank steps."""

    parameter: int
    begin: int
    end: int
    owner: int  # index of the rank
    is_whole: bool


def plan_parts(sizes: Sequence[tuple[int, int]], ranks: int, *, may_cut: bool) -> list[Part]:
    """Divide consecutive parameters among ranks, with bytes as equal as possible.

    A parameter that crosses the border between two ranks' fair parts is cut there, if it may be cut
    and is not small; otherwise it belongs to the rank whose fair part has its middle.

    Args:
        sizes: for each parameter, the number of elements and the bytes of an element.
        ranks: the number of ranks.
        may_cut: whether parameters may be cut.
    """
    fair = sum(numel * itemsize for numel, itemsize in sizes) / ranks
    parts: list[Part] = []
    begin_bytes = 0
    for index, (numel, itemsize) in enumerate(sizes):
        nbytes = numel * itemsize
        edges = {0, numel}
        if may_cut and nbytes * _LEAST_CUT >= fair:
            inner = (k * fair - begin_bytes for k in range(1, ranks))
            edges |= {round(at / itemsize / _CUT) * _CUT for at in inner if 0 < at < nbytes}
        inside = sorted(edge for edge in edges if edge <= numel)
        for begin, end in pairwise(inside) if numel else [(0, 0)]:
            middle = begin_bytes + (begin + end) / 2 * itemsize
            owner = min(int(middle / fair), ranks - 1) if fair else 0
            if parts and parts[-1].parameter == index and parts[-1].owner == owner:
                begin = parts.pop().begin  # a rank has one part of a parameter at most
            parts.append(Part(index, begin, end, owner, end - begin == numel))
        begin_bytes += nbytes
    return parts


def flat(tensor: Tensor) -> Tensor:
    """Return the elements in the order of memory, without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def cut(tensor: Tensor, part: Part, like: Tensor | None = None) -> Tensor:
    """Return a part of a tensor in the memory layout of `like`: a view if possible, or a copy."""
    if part.is_whole:
        return tensor
    if like is not None and tensor.stride() != like.stride():
        memory = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = memory.copy_(tensor)
    return flat(tensor)[part.begin : part.end]
