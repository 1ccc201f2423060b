# SPDX-License-Identifier: Apache-2.0
"""The native module's stand-in on macOS and Windows: a world of one rank, in Python.

``torch_ring._C`` is this file there, and ``torch_ring/_C.pyi`` documents it. A rank that is alone
agrees with nobody: an operation has ended when it is submitted, and its result is a copy of its
input, or that times a factor. Here is only what such a rank calls.
"""

from __future__ import annotations

import functools
import operator
from collections import namedtuple
from collections.abc import Sequence
from enum import Enum
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_ring.errors import InvalidArgumentError, RingError

COLLECTIVES = [
    SimpleNamespace(name=name, torch=name, has_groups=True)
    for name in ("allreduce", "allgather", "reducescatter")
]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BITS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_SUMMED = (*_FLOATS, *_BITS[:-1], torch.complex64, torch.complex128)
_TAKEN = [_SUMMED, _SUMMED, _FLOATS, *[_FLOATS + _BITS] * 3, *[_BITS] * 3]  # by ReduceOp
_ADASUM = 2


class Engine:
    """Runs the operations of a process set of one rank."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._has_ended = False

    def run(
        self,
        collective: str,
        tensor: Tensor | None = None,
        output: Tensor | None = None,
        name: str | None = None,
        _root_or_blocking: int = -1,
        op: int = 1,
        *factors: float,
        splits: Sequence[int] | None = None,
        **_: Any,
    ) -> Tensor | None:
        if self._has_ended:
            raise RingError("torch_ring was shut down")
        if tensor is None:  # of a barrier
            return None
        try:
            with torch.no_grad():
                value = _values(tensor)
                if collective in ("allreduce", "reducescatter"):
                    value = _scaled(value, op, factors)
                if collective in ("allreduce", "broadcast"):
                    result = value.clone()
                else:
                    rows = [len(value)] if splits is None else splits
                    result = value.narrow(0, 0, *rows).clone(memory_format=torch.contiguous_format)
                return result if output is None else output.copy_(result)
        except (RuntimeError, TypeError) as error:  # as torch refuses it
            what = f"{collective} {name!r}" if name else collective
            raise InvalidArgumentError(f"{what}: {error}") from error

    def submit(self, *given: Any, **options: Any) -> SimpleNamespace:
        return _ended(self.run(*given, **options))

    def submit_group(
        self, collective: str, tensors: Any, outputs: Any = (), *more: Any, **options: Any
    ) -> list[SimpleNamespace]:
        pairs = zip_longest(tensors, outputs)
        return [self.submit(collective, *pair, *more, **options) for pair in pairs]

    def join(self) -> SimpleNamespace:
        return _ended(0)

    def end(self, why: str) -> NoReturn:
        raise RingError(why)

    def empty_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def records(self) -> list[Any]:
        return []

    messages = records
    vacant_gradient_bytes = staticmethod(int)

    def totals(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("inlined", "fused", "lag_ns", "rounds"), 0)
        return {"operations": {}, "lags": [0], **nothing}

    def message_totals(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("messages", "failed", "bytes"), 0)
        return {"sent": nothing, "received": nothing}

    def shutdown(self, *_: Any, **__: Any) -> None:
        self._has_ended = True

    def abandon(self) -> None:
        """Do nothing: a forked child may keep the engine."""


def _ended(result: Any) -> SimpleNamespace:
    """Return the `Work` of an operation."""
    return SimpleNamespace(
        done=lambda: True, wait=lambda *_: result, received_splits=lambda: list(result.shape[:1])
    )


def _values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor. TypeError: the native module does not take it, either."""
    if (
        tensor.layout != torch.strided
        or tensor.is_meta
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
    ):
        raise TypeError("takes dense tensors, and neither torch.func nor forward-mode derivatives")
    return tensor.detach()


def _scaled(value: Tensor, op: int, factors: Sequence[float]) -> Tensor:
    """Return the product, rounded as `ReduceOp` says."""
    if value.dtype not in _TAKEN[op]:
        raise TypeError(f"operator {op} takes {_TAKEN[op]}, not {value.dtype}")
    if value.is_complex():
        return torch.view_as_complex(_scaled(torch.view_as_real(value.resolve_conj()), op, factors))
    product = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    for factor in map(float, factors):
        if factor == 1.0 or value.dtype == torch.bool:
            continue
        if value.is_floating_point():
            product = product * factor
        else:
            product = _scaled_integers(product, factor)
        if op == _ADASUM:  # each product is rounded
            product = product.to(value.dtype).to(product.dtype)
    return product.to(value.dtype)


def _scaled_integers(value: Tensor, factor: float) -> Tensor:
    limits = torch.iinfo(value.dtype)
    exact = int(factor) if factor.is_integer() else factor
    product = value.to("cpu", copy=True)  # one by one: only the CPU can
    product.apply_(lambda number: int(min(limits.max, max(limits.min, number * exact))))
    return product.to(value.device)


Worst = Enum("Worst", ["finite", "large", "infinite", "nan"])
Due = Enum("Due", ["now", "begun", "everything"])
NotFinite = namedtuple("NotFinite", ["parameter", "rank", "worst", "carries"])


def _worst(gradient: Tensor) -> Worst:
    numbers = gradient._values() if gradient.is_sparse else gradient
    if numbers.layout != torch.strided:  # compressed rows, for example
        numbers = numbers.values()
    if numbers.isnan().any():
        return Worst.nan
    return Worst.infinite if numbers.isinf().any() else Worst.finite


def sparse_message(own: Tensor, _like: Tensor, _op: int) -> tuple[Tensor, Tensor]:
    return own._indices(), own._values().detach()


def sparse_sum(*given: Any) -> Tensor:
    _what, _op, like, _ranks, headers, _lengths, values, is_coalesced = given
    return torch.sparse_coo_tensor(headers, values, like.shape, is_coalesced=is_coalesced)


GradientHooks = SimpleNamespace(worst_numbers=lambda gradients: [*map(_worst, gradients)])
LaunchOrder = functools.partial(SimpleNamespace, share=lambda: None)
empty_result_like = functools.partial(torch.empty_like, requires_grad=False)
backward_name = "backward.{}".format
all_sent = operator.eq

_ANSWERS = {"kept_result_bytes": 0, "limit_to_raise": "", "nccl_version": 0}


def __getattr__(name: str) -> Any:
    """Return what several ranks need, for imports: a class, or a function that answers nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {}) if name[0].isupper() else lambda *_: _ANSWERS.get(name)
