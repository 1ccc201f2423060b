"""Header, pack, unpack: the wire format of a compressor round."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ring.compression.stateful import Gather, Request

__all__ = ["Header", "Layout", "Line", "pack", "unpack"]

_ALIGNMENT_BYTES = 16  # the largest element: tensors of a message are used where they lie

_GATHER, _REDUCE = "gather", "reduce"


class Layout(NamedTuple):
    """The dtype and the shape of a tensor in a message."""

    dtype: str
    shape: Sequence[int]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), list(tensor.shape))

    @property
    def padded_bytes(self) -> int:
        """Bytes up to the beginning of the next tensor."""
        size = prod(self.shape) * self.torch_dtype.itemsize
        return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
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
        """Return the line of a request for a parameter."""
        kind = _GATHER if isinstance(request, Gather) else _REDUCE
        return cls(parameter, kind, [Layout.of(tensor) for tensor in request.tensors])

    @property
    def is_gather(self) -> bool:
        """Whether the request is a `Gather`, else a `Reduce`."""
        return self.kind == _GATHER

    def __str__(self) -> str:
        """Return the part that must be the same on all ranks: layouts of gathers may differ."""
        what = f"{self.kind} for '{self.parameter}'"
        return f"{what} {self.layouts[0]}" if self.kind == _REDUCE else what


class Header(NamedTuple):
    """What one rank asks for in a round, or why it failed."""

    lines: Sequence[Line]
    failure: str | None = None

    def encode(self) -> bytes:
        """Return the bytes that `decode_all` decodes."""
        return json.dumps(self).encode() + b"\n"

    @classmethod
    def decode_all(cls, data: bytes) -> list[Header]:
        """Return the headers of all ranks, which follow one another in `data`."""
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
        device=tensors[0].device if tensors else "cpu",
    )
    for packed, tensor in zip(unpack(message, layouts), tensors, strict=True):
        packed.copy_(tensor)
    return message


def unpack(message: Tensor, layouts: Iterable[Layout]) -> Iterator[Tensor]:
    """Yield views of `message`, one for each layout."""
    begin = 0
    for layout in layouts:
        end = begin + prod(layout.shape) * layout.torch_dtype.itemsize
        yield message[begin:end].view(layout.torch_dtype).view(layout.shape)
        begin += layout.padded_bytes
