"""What the generators of a stateful compressor ask for at once, on its way to all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ring import _C
from torch_ring.errors import MismatchError, RingError
from torch_ring.reduce_op import ReduceOp
from torch_ring.stateful import Gather, Reduce, Request

__all__ = ["Collectives", "Round"]

_ALIGNMENT_BYTES = 16  # the largest element: tensors of a message are used where they lie


@dataclass(frozen=True)
class Collectives:
    """What requests become.

    Attributes:
        engine: runs it.
        mean_arguments: operator, prescale and postscale factor of an allreduce that makes a mean.
    """

    engine: _C.Engine
    mean_arguments: tuple[ReduceOp, float, float]

    def allgather(self, name: str, tensor: Tensor) -> _C.Work:
        """Start to concatenate the ranks' tensors."""
        return self.engine.allgather(tensor, name)

    def mean(self, name: str, tensor: Tensor) -> _C.Work:
        """Start to make the mean over ranks, in a new tensor."""
        tensor = tensor.contiguous()
        return self.engine.allreduce(
            tensor, _C.empty_result_like(tensor), name, *self.mean_arguments
        )


class Round:
    """One request of each generator, on its way.

    What they gather is packed into one message; what they reduce is fused by the engine.
    """

    def __init__(
        self,
        collectives: Collectives,
        name: str,
        requests: Mapping[str, Request],
        failure: str | None,
    ) -> None:
        self._header = Header([Line.of(*item) for item in requests.items()], failure)
        self._encoded = self._header.encode()
        text = torch.frombuffer(bytearray(self._encoded), dtype=torch.uint8)
        self._headers = collectives.allgather(f"{name}.header", text)
        gathers = [request for request in requests.values() if isinstance(request, Gather)]
        self._messages: _C.Work | None = None
        if gathers:
            message = pack([tensor for request in gathers for tensor in request.tensors])
            self._messages = collectives.allgather(f"{name}.message", message)
        self._means = [
            collectives.mean(f"{name}.{parameter}", request.tensors[0])
            if isinstance(request, Reduce)
            else None
            for parameter, request in requests.items()
        ]

    def answers(self) -> list[Any]:
        """Wait, and return what the ranks answer to the requests, in their order."""
        headers = self._wait_for_headers()
        _require_same_requests(headers)
        gathered = iter(self._wait_for_messages(headers))
        return [next(gathered) if mean is None else mean.wait() for mean in self._means]

    def _wait_for_headers(self) -> Sequence[Header]:
        received = bytes(self._headers.wait().numpy())
        ranks = len(received) // len(self._encoded)
        if received == self._encoded * ranks:  # the usual case: nothing to decode
            return [self._header] * ranks
        return Header.decode_all(received)

    def _wait_for_messages(self, headers: Sequence[Header]) -> list[list[tuple[Tensor, ...]]]:
        """Return what the ranks have sent for each gather."""
        if self._messages is None:
            return []
        lines_of = [[line for line in header.lines if line.kind == _GATHER] for header in headers]
        layouts = [layout for lines in lines_of for line in lines for layout in line.layouts]
        tensors = places(self._messages.wait(), layouts)
        by_rank = [
            [tuple(islice(tensors, len(line.layouts))) for line in lines] for lines in lines_of
        ]
        return [list(tuples) for tuples in zip(*by_rank, strict=True)]


def _require_same_requests(headers: Sequence[Header]) -> None:
    for rank, header in enumerate(headers):
        if header.failure:
            raise RingError(f"the compressor failed on rank {rank}: {header.failure}")
    first, *others = headers
    for rank, other in enumerate(others, start=1):
        for left, right in zip_longest(first.lines, other.lines, fillvalue="nothing more"):
            if str(left) != str(right):
                raise MismatchError(
                    f"the compressor asks for different things: rank 0: {left}; rank {rank}: "
                    f"{right}. What it yields must not depend on one rank's gradient"
                )


# --- the wire format

_GATHER, _REDUCE = "gather", "reduce"


class Layout(NamedTuple):
    """What a tensor's bytes mean."""

    dtype: str
    shape: Sequence[int]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(str(tensor.dtype).removeprefix("torch."), list(tensor.shape))

    @property
    def padded_bytes(self) -> int:
        """Bytes up to where the next tensor may begin."""
        size = prod(self.shape) * self.torch_dtype.itemsize
        return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Line(NamedTuple):
    """One request in a header."""

    parameter: str
    kind: str
    layouts: Sequence[Layout]  # of its tensors

    @classmethod
    def of(cls, parameter: str, request: Request) -> Line:
        kind = _GATHER if isinstance(request, Gather) else _REDUCE
        return cls(parameter, kind, [Layout.of(tensor) for tensor in request.tensors])

    def __str__(self) -> str:
        """Say what must be the same on all ranks: each may gather what it likes."""
        what = f"{self.kind} for '{self.parameter}'"
        return f"{what} {self.layouts[0]}" if self.kind == _REDUCE else what


class Header(NamedTuple):
    """What a rank says about a round."""

    lines: Sequence[Line]
    failure: str | None = None

    def encode(self) -> bytes:
        """Return the bytes that `decode_all` understands."""
        return json.dumps(self).encode() + b"\n"

    @classmethod
    def decode_all(cls, data: bytes) -> list[Header]:
        """Return the headers of the ranks, which follow one another in `data`."""
        decoded = [json.loads(text) for text in data.splitlines()]
        return [
            cls(
                [
                    Line(parameter, kind, [Layout(*layout) for layout in layouts])
                    for parameter, kind, layouts in lines
                ],
                failure,
            )
            for lines, failure in decoded
        ]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of `tensors`, one after the other."""
    layouts = [Layout.of(tensor) for tensor in tensors]
    message = torch.empty(
        sum(layout.padded_bytes for layout in layouts),
        dtype=torch.uint8,
        device=tensors[0].device if tensors else None,
    )
    for place, tensor in zip(places(message, layouts), tensors, strict=True):
        place.copy_(tensor)
    return message


def places(message: Tensor, layouts: Iterable[Layout]) -> Iterator[Tensor]:
    """Yield the tensors of these layouts that lie in `message`."""
    begin = 0
    for layout in layouts:
        end = begin + prod(layout.shape) * layout.torch_dtype.itemsize
        yield message[begin:end].view(layout.torch_dtype).view(layout.shape)
        begin += layout.padded_bytes
