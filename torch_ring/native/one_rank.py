# SPDX-License-Identifier: Apache-2.0
"""The native module's stand-in on macOS and Windows: a world of one rank, in Python.

``torch_ring._C`` is this file there, and ``torch_ring/_C.pyi`` documents it. A rank that is alone
agrees with nobody: an operation has ended when it is submitted, and its result is a copy of its
input, or that times a factor.
"""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.native import NEEDS_LINUX

BUILT_FOR_TORCH = str(torch.__version__)

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("allreduce", "reducescatter", "reduce")
_GROUPED = ("allreduce", "allgather", "reducescatter")
COLLECTIVES = [
    SimpleNamespace(name=name, torch=name, has_groups=name in _GROUPED)
    for name in dict.fromkeys((*_REDUCING, "allgather", "alltoall", *_ROOTED))
]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SUMMED = (*_FLOATS, *_INTEGERS, torch.complex64, torch.complex128)
_ORDERED = (*_FLOATS, *_INTEGERS, torch.bool)
_BITS = (*_INTEGERS, torch.bool)
_OPS = (  # in the order of their numbers
    *(("Average", _SUMMED), ("Sum", _SUMMED), ("Adasum", _FLOATS)),
    *(("Min", _ORDERED), ("Max", _ORDERED), ("Product", _ORDERED)),
    *(("Band", _BITS), ("Bor", _BITS), ("Bxor", _BITS)),
)


class Work:
    """An operation, which has ended."""

    def __init__(self, result: Tensor | None) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self, waited: Work | None = None) -> Tensor | None:  # noqa: ARG002
        return self._result

    def received_splits(self) -> list[int]:
        return [0 if self._result is None else len(self._result)]


class Engine:
    """Runs the operations of a process set of one rank."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._has_ended = False

    def submit(
        self,
        collective: str,
        tensor: Tensor | None = None,
        output: Tensor | None = None,
        name: str | None = None,
        _blocking: bool = False,
        op: int = 1,
        *factors: float,
        root: int = -1,
        splits: Sequence[int] | None = None,
        **_: Any,
    ) -> Work:
        if self._has_ended:
            raise RingError("torch_ring was shut down")
        if collective in ("barrier", "fence"):
            return Work(None)
        what = f"{collective} {name!r}" if name else collective
        if collective in _ROOTED and root != 0:
            _refuse(f"{what}: root rank {root} is not one of the 1 ranks")
        if tensor is None:
            _refuse(f"{what}: a tensor is missing")
        with torch.no_grad():
            value = _value(collective, what, tensor, op, factors, splits)
            if output is not None:
                return Work(_written(value, output, what))
            like_input = collective in ("allreduce", "broadcast", "reduce")
            layout = torch.preserve_format if like_input else torch.contiguous_format
            return Work(torch.empty_like(value, memory_format=layout).copy_(value))

    def submit_group(
        self,
        collective: str,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        name: str | None = None,
        *more: Any,
        **options: Any,
    ) -> list[Work]:
        works = []
        for index, tensor in enumerate(tensors):
            output, own = outputs[index] if outputs else None, name and f"{name}.{index}"
            works.append(self.submit(collective, tensor, output, own, *more, **options))
        return works

    def run(
        self,
        collective: str,
        tensor: Tensor | None = None,
        output: Tensor | None = None,
        name: str | None = None,
        root: int = -1,
        *more: Any,
    ) -> Tensor | None:
        return self.submit(collective, tensor, output, name, True, *more, root=root).wait()

    def join(self) -> Work:
        return Work(torch.zeros((), dtype=torch.int64, device="cpu"))

    def end(self, why: str) -> NoReturn:
        raise RingError(why)

    def empty_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def records(self) -> list[Any]:
        return []

    messages = records

    def totals(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("inlined", "fused", "lag_ns", "rounds"), 0)
        return {"operations": {}, "lags": [0], **nothing}

    def message_totals(self) -> dict[str, Any]:
        return {way: {"messages": 0, "failed": 0, "bytes": 0} for way in ("sent", "received")}

    def vacant_gradient_bytes(self) -> int:
        return 0

    def observe(self, stream: RecordStream | None) -> None:
        """Do nothing: there is no timeline."""

    def shutdown(self, *_: Any, **__: Any) -> None:
        self._has_ended = True

    def abandon(self) -> None:
        """Do nothing: a forked child may keep the engine."""


def _refuse(why: str) -> NoReturn:
    raise InvalidArgumentError(why)


def _value(
    collective: str,
    what: str,
    tensor: Tensor,
    op: int,
    factors: Sequence[float],
    splits: Sequence[int] | None,
) -> Tensor:
    """Return the values of a collective's result, maybe as a view of `tensor`."""
    if tensor.layout != torch.strided or tensor.is_nested:
        _refuse(f"{what}: the tensor is not dense: use to_dense(), or sparse_allreduce_async()")
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        _refuse(f"{what}: the tensor has no memory: is it on meta, or in vmap, jvp or a trace?")
    level = forward_ad._current_level
    if level >= 0 and torch._VF._unpack_dual(tensor, level=level)[1] is not None:
        _refuse(f"{what}: forward-mode derivatives are not supported")
    value = tensor.detach()
    if collective in ("allgather", "alltoall", "reducescatter") and value.dim() == 0:
        _refuse(f"{what}: a scalar has no first dimension: reshape(1)")
    if collective in _REDUCING:
        name, taken = _OPS[op]
        if value.dtype not in taken:
            words = ", ".join(str(each).removeprefix("torch.") for each in taken)
            _refuse(f"{what}: there is no {name} of {value.dtype}: it takes {words}")
        for each in [factors[:1], factors[1:]] if name == "Adasum" else [factors]:
            value = _scaled(value, [float(factor) for factor in each])  # each result is rounded
        return value
    if collective == "alltoall" and splits is not None:
        if len(splits) != 1 or not 0 <= splits[0] <= len(value):
            _refuse(f"{what}: the splits {list(splits)} are not those of {len(value)} rows")
        return value[: splits[0]]
    return value.unsqueeze(0) if collective == "gather" else value


def _written(value: Tensor, output: Tensor, what: str) -> Tensor:
    """Return `output`, with the values."""
    if output.shape != value.shape or (output.dtype, output.device) != (value.dtype, value.device):
        _refuse(f"{what}: the output differs from the input in shape, dtype or device")
    if torch._debug_has_internal_overlap(output) == 1:
        _refuse(f"{what}: cannot write into an expanded tensor: clone() it")
    output.detach().copy_(value)
    return output


def _scaled(value: Tensor, factors: Sequence[float]) -> Tensor:
    """Return the product, rounded as the native module rounds it."""
    factors = [factor for factor in factors if factor != 1.0]
    if value.dtype == torch.bool or not factors:
        return value
    if value.is_complex():
        return torch.view_as_complex(_scaled(torch.view_as_real(value.resolve_conj()), factors))
    wide = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    for factor in factors:
        wide = wide * factor if wide.is_floating_point() else _scaled_integers(wide, factor)
    return wide.to(value.dtype)


def _scaled_integers(value: Tensor, factor: float) -> Tensor:
    """Return products truncated toward zero, and clamped to the range of the dtype.

    NaN becomes the lowest number. A product of 64 bits that is within 512 of the range's end may
    become that end, where the native module has the exact number.
    """
    limits = torch.iinfo(value.dtype)
    host = value.cpu()  # another device may have no float64
    near = host.double() * factor
    is_whole = limits.bits == 64 and factor.is_integer() and abs(factor) < 2**63
    product = host * int(factor) if is_whole else near.trunc().to(value.dtype)
    product = torch.where(near < float(limits.max) + 1.0, product, limits.max)
    return torch.where(near > limits.min, product, limits.min).to(value.device)


# --- what a world of one needs beside an engine


class StoreCall:
    """A call of a store, made at once: an elastic job of one rank serves a store to itself."""

    def __init__(self, result: Any) -> None:
        self._result = result

    @staticmethod
    def serve(host: str, port: int, timeout_s: float, listening: int | None) -> StoreCall:
        patience = timedelta(seconds=timeout_s)
        return StoreCall(
            TCPStore(host, port, None, True, patience, False, master_listen_fd=listening)
        )

    def wait(self, seconds: float) -> bool:  # noqa: ARG002
        return True

    def result(self) -> Any:
        return self._result


class LaunchOrder:
    """One rank's operations on a device have the order of its program."""

    def share(self) -> None: ...


class RecordStream:
    """Gets no records."""

    def __init__(self, capacity: int) -> None: ...


class Timeline:
    """Writes no file: a timeline is about waits for other ranks."""

    def __init__(self, *, log: Callable[[str], None], **_: Any) -> None:
        log(f"no timeline is written: it {NEEDS_LINUX}")

    def watch(self, stream: RecordStream) -> None: ...

    def dropped(self) -> int:
        return 0

    def stop(self, patience_s: float) -> None: ...


Worst = Enum("Worst", ["finite", "large", "infinite", "nan"])
Due = Enum("Due", ["now", "begun", "everything"])
NotFinite = namedtuple("NotFinite", ["parameter", "rank", "worst", "carries"])


class GradientHooks:
    """Looks at gradients, which nothing averages."""

    @staticmethod
    def worst_numbers(gradients: Sequence[Tensor]) -> list[Worst]:
        values = [_stored_numbers(each) for each in gradients]
        nans = [bool(each.isnan().any()) for each in values]
        infinities = [bool(each.isinf().any()) for each in values]
        pairs = zip(nans, infinities, strict=True)
        return [Worst.nan if n else Worst.infinite if i else Worst.finite for n, i in pairs]


def _stored_numbers(tensor: Tensor) -> Tensor:
    if tensor.layout == torch.sparse_coo:
        return tensor._values()
    compressed = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    values = tensor.values() if tensor.layout in compressed else tensor
    return values if values.layout == torch.strided else torch.empty(0)


def sparse_message(own: Tensor, _like: Tensor, _op: int) -> tuple[Tensor, Tensor]:
    return own._indices(), own._values().detach()


def sparse_sum(*given: Any) -> Tensor:
    _what, _op, like, _ranks, headers, _lengths, values, is_coalesced = given
    return torch.sparse_coo_tensor(headers, values, like.shape, is_coalesced=is_coalesced)


def empty_result_like(like: Tensor) -> Tensor:
    return torch.empty_like(like, requires_grad=False)


def nccl_version(library: str) -> int:  # noqa: ARG001
    _refuse(f"NCCL {NEEDS_LINUX}")


backward_name = "backward.{}".format
all_sent = operator.eq

_ANSWERS = {
    **dict.fromkeys(("arm_failpoints", "device_in_use", "forget_calls", "in_words"), None),
    **{"await_calls": True, "keep_results": None, "kept_result_bytes": 0, "limit_to_raise": ""},
}
_OF_SEVERAL = """
    ControlPlane GradientReport HostMemory MessageRecord OperationRecord PassAgreement PassDecision
    PassEnd PassReport Pending PlainReduction PlannedBucket PromisedLaunches RingBackend RunAhead
    bucket_name decide least_memory make_memory mappable_bytes memory_table ucx_found
"""


def _refuse_several(self: object, *_: Any, **__: Any) -> None:
    raise RingError(f"{type(self).__name__} {NEEDS_LINUX}")


for _name, _answer in _ANSWERS.items():
    globals()[_name] = lambda *_, answer=_answer: answer
for _name in _OF_SEVERAL.split():
    globals()[_name] = type(_name, (), {"__init__": _refuse_several})
