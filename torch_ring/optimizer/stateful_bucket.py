# SPDX-License-Identifier: Apache-2.0
"""StatefulBucket: a bucket whose gradients a stateful compressor reduces, round by round."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ring._C import Engine, Work, all_sent, empty_result_like
from torch_ring.collectives.compare import require_same_lines
from torch_ring.collectives.reduce_op import ReduceOp
from torch_ring.compression.stateful import Gather, Reduce, Request, State, StatefulCompressor
from torch_ring.errors import RingError
from torch_ring.optimizer.buckets import Bucket

__all__ = ["BucketCompression", "Layout", "Line", "StatefulBucket", "pack", "unpack"]


def state_if_finite(result: Tensor, after: State, before: State) -> State:
    """Return the state after a result if the result is finite, else the state before it.

    If the states differ only in tensors of the same shapes, the device chooses them, and the host
    does not wait. This is so once a parameter has a state. At first, and if something else has
    changed, the host must wait for the result.

    Args:
        result: a tensor of any shape, not empty.
        after: the new state, with new tensors in place of those of `before`.
        before: the old state; empty at first.
    """
    is_finite = result.abs().amax().isfinite()
    if not is_finite.is_cpu:
        chosen = _chosen_there(is_finite, after, before)
        if chosen is not None:
            return chosen
    return after if is_finite else before


def _chosen_there(is_finite: Tensor, after: State, before: State) -> State | None:
    """Return the state chosen on the device; None: the host must choose."""
    if after.keys() != before.keys():
        return None
    chosen: State = {}
    for key, new in after.items():
        old = before[key]
        if new is old:
            chosen[key] = old
        elif _is_like(new, old) and new.device == is_finite.device:
            chosen[key] = torch.where(is_finite, new, old)
        else:
            return None
    return chosen


def _is_like(new: object, old: object) -> bool:
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return False
    return (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)


_ALIGNMENT_BYTES = 16  # of the largest element: a message's tensors are used in place

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
        """The dtype as a torch.dtype."""
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
        """Return the line for a parameter's request."""
        kind = _GATHER if isinstance(request, Gather) else _REDUCE
        return cls(parameter, kind, [Layout.of(tensor) for tensor in request.tensors])

    @property
    def is_gather(self) -> bool:
        """Whether the request is a `Gather`, not a `Reduce`."""
        return self.kind == _GATHER

    def __str__(self) -> str:
        """Return the part that must be the same on all ranks: layouts of gathers may differ."""
        what = f"{self.kind} for '{self.parameter}'"
        return f"{what} {self.layouts[0]}" if self.kind == _REDUCE else what


class Header(NamedTuple):
    """One rank's requests in a round, or the reason of its failure."""

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


@dataclass(frozen=True)
class BucketCompression:
    """The stateful compressor of one optimizer, with its means to reduce a bucket.

    Attributes:
        compressor: serves this optimizer alone.
        named_parameters: the optimizer's, in the order of their indices.
        engine: answers the compressor's requests.
        mean_arguments: operator, prescale and postscale factor of an allreduce that makes a mean.
        scale: multiplies the means: the number of ranks for op=Sum, else 1.
    """

    compressor: StatefulCompressor
    named_parameters: Sequence[tuple[str, Tensor]]
    engine: Engine
    mean_arguments: tuple[ReduceOp, float, float]
    scale: int

    def __post_init__(self) -> None:
        self.compressor.serve(dict(self.named_parameters))

    def mean(self, name: str, tensor: Tensor) -> Work:
        """Start to make the mean over ranks, in a new tensor."""
        tensor = tensor.contiguous()
        output = empty_result_like(tensor)
        return self.engine.submit("allreduce", tensor, output, name, False, *self.mean_arguments)


class CompressorRound:
    """One request of each generator, being exchanged among all ranks.

    Gathers are packed into one message; reductions are fused by the engine.
    """

    def __init__(
        self,
        compression: BucketCompression,
        name: str,
        requests: Mapping[str, Request],
        failure: str | None,
    ) -> None:
        self._header = Header([Line.of(*item) for item in requests.items()], failure)
        self._encoded = self._header.encode()
        text = torch.frombuffer(bytearray(self._encoded), dtype=torch.uint8)
        self._headers = compression.engine.submit("allgather", text, None, f"{name}.header")
        gathers = [request for request in requests.values() if isinstance(request, Gather)]
        self._messages: Work | None = None
        if gathers:
            message = pack([tensor for request in gathers for tensor in request.tensors])
            self._messages = compression.engine.submit(
                "allgather", message, None, f"{name}.message"
            )
        self._means = [
            compression.mean(f"{name}.{parameter}", request.tensors[0])
            if isinstance(request, Reduce)
            else None
            for parameter, request in requests.items()
        ]

    def answers(self) -> list[Any]:
        """Wait for the answers, and return them in the order of the requests."""
        headers = self._wait_for_headers()
        _require_same_requests(headers)
        gathered = iter(self._wait_for_messages(headers))
        return [next(gathered) if mean is None else mean.wait() for mean in self._means]

    def _wait_for_headers(self) -> Sequence[Header]:
        received = bytes(self._headers.wait().numpy())
        if all_sent(received, self._encoded):  # the usual case: nothing to decode
            return [self._header] * (len(received) // len(self._encoded))
        return Header.decode_all(received)

    def _wait_for_messages(self, headers: Sequence[Header]) -> list[list[tuple[Tensor, ...]]]:
        """Return the tensors that the ranks have sent for each gather."""
        if self._messages is None:
            return []
        lines_of = [[line for line in header.lines if line.is_gather] for header in headers]
        layouts = [layout for lines in lines_of for line in lines for layout in line.layouts]
        tensors = unpack(self._messages.wait(), layouts)
        by_rank = [
            [tuple(islice(tensors, len(line.layouts))) for line in lines] for lines in lines_of
        ]
        return [list(tuples) for tuples in zip(*by_rank, strict=True)]


def _require_same_requests(headers: Sequence[Header]) -> None:
    for rank, header in enumerate(headers):
        if header.failure:
            raise RingError(f"the compressor failed on rank {rank}: {header.failure}")
    if len(set(map(id, headers))) == 1:  # the usual case: all have sent the same bytes
        return
    require_same_lines(
        {rank: [str(line) for line in header.lines] for rank, header in enumerate(headers)},
        "the compressor asks for different things",
        ". What it yields must not depend on one rank's gradient",
        absent="nothing more",
    )


class StatefulBucket:
    """A `BucketWire` whose gradients a stateful compressor reduces.

    Args:
        compression: shared by the buckets of an optimizer.
        bucket: the bucket.
        view_of: returns the gradient of a parameter, by its index, in the bucket's memory.
    """

    is_launchable = False
    buffer: Tensor | None = None

    def __init__(
        self, compression: BucketCompression, bucket: Bucket, view_of: Callable[[int], Tensor]
    ) -> None:
        self._compression = compression
        self._bucket = bucket
        self._view_of = view_of

    def start(
        self,
        name: Callable[[int], str],
        memory: Tensor,  # noqa: ARG002
        touched: int,
        *,
        blocking: bool,  # noqa: ARG002  every round waits
    ) -> list[Callable[[], bool]]:
        """Start to reduce the touched gradients of the bucket."""
        gradients: dict[str, Tensor] = {}
        for slot in self._bucket.slots:
            if touched >> slot.parameter & 1 and slot.numel:
                parameter_name, _ = self._compression.named_parameters[slot.parameter]
                view = self._view_of(slot.parameter)
                gradients[parameter_name] = torch.view_as_real(view) if view.is_complex() else view
        return [_StatefulReduction(self._compression, name(0), gradients).advance]


class _StatefulReduction:
    """Gradients of one bucket that a stateful compressor reduces in place.

    In each round all generators run to their next request, and all requests are answered. The last
    round is empty: it gives an error to a rank that asks once more than the others.

    Thread: the one that runs backward(); the first round may begin in a thread of autograd.
    Blocking: `advance`.
    """

    def __init__(
        self, compression: BucketCompression, name: str, gradients: Mapping[str, Tensor]
    ) -> None:
        self._compression = compression
        self._name = name
        self._rounds = 0
        self._failures: list[Exception] = []  # at most one, until it is raised
        started = [_CompressedGradient(compression, *item) for item in gradients.items()]
        self._begin((gradient, None) for gradient in started)

    def advance(self) -> bool:
        """Wait for the answers of a round and begin the next; return whether there is a next.

        Raises:
            Exception: the exception of the compressor on this rank.
            RingError: the compressor failed on another rank.
            MismatchError: the generators ask for different things on two ranks.
        """
        try:
            answers = self._round.answers()
        except RingError as error:
            if self._failures:
                raise self._failures.pop() from error
            raise
        if self._asking:
            self._begin(zip(self._asking, answers, strict=True))
            return True
        return False

    def _begin(self, answers: Iterable[tuple[_CompressedGradient, Any]]) -> None:
        """Resume the generators with their answers, and send their next requests."""
        requests: dict[_CompressedGradient, Request] = {}
        failure = None
        try:
            for gradient, answer in answers:
                request = gradient.resume(answer)
                if request is not None:
                    requests[gradient] = request
        except Exception as error:  # raised after the exchange, when the other ranks know it, too
            self._failures.append(error)
            requests, failure = {}, f"{type(error).__name__}: {error}"
        self._asking = list(requests)
        by_name = {gradient.name: request for gradient, request in requests.items()}
        self._round = CompressorRound(
            self._compression, f"{self._name}.{self._rounds}", by_name, failure
        )
        self._rounds += 1


class _CompressedGradient:
    """One gradient and its generator."""

    def __init__(self, compression: BucketCompression, name: str, gradient: Tensor) -> None:
        self.name = name
        self._states = compression.compressor.states
        self._scale = compression.scale
        self._gradient = gradient
        self._state: State = dict(self._states.get(name, {}))
        wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient
        self._generator = compression.compressor.reduce(wide, self._state)
        if not isinstance(self._generator, Generator):
            raise TypeError(
                f"reduce() of {compression.compressor} is no generator: it does not yield"
            )

    def resume(self, answer: Any) -> Request | None:
        """Return the next request; None when the gradient is reduced."""
        try:
            # Autograd may have called us in the program's autocast region.
            with torch.no_grad(), torch.autocast(self._gradient.device.type, enabled=False):
                request = self._generator.send(answer)
        except StopIteration as stop:
            self._finish(stop.value)
            return None
        if not isinstance(request, Gather | Reduce):
            raise TypeError(f"'{self.name}': yield Gather or Reduce, not {request!r}")
        return request

    def _finish(self, mean: Any) -> None:
        if not isinstance(mean, Tensor) or mean.shape != self._gradient.shape:
            got = list(mean.shape) if isinstance(mean, Tensor) else repr(mean)
            raise ValueError(
                f"'{self.name}': reduce() returned {got}, not a tensor of shape "
                f"{list(self._gradient.shape)}"
            )
        before = self._states.get(self.name, {})
        state = state_if_finite(mean, self._state, before)
        if state or before:
            self._states[self.name] = state
        self._gradient.copy_(mean if self._scale == 1 else mean * self._scale)
