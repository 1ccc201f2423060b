"""CompressorRound: packs compressors' requests, sends them to all ranks, hands back the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from torch_ring._C import Engine, Work, all_sent, empty_result_like
from torch_ring.collectives.reduce_op import ReduceOp
from torch_ring.compression.stateful import Gather, Reduce, Request
from torch_ring.errors import MismatchError, RingError
from torch_ring.optimizer.compressor_wire import Header, Line, pack, unpack

__all__ = ["Collectives", "CompressorRound"]


@dataclass(frozen=True)
class Collectives:
    """The collectives by which requests of compressors are answered.

    Attributes:
        engine: runs them.
        mean_arguments: operator, prescale and postscale factor of an allreduce that makes a mean.
    """

    engine: Engine
    mean_arguments: tuple[ReduceOp, float, float]

    def allgather(self, name: str, tensor: Tensor) -> Work:
        """Start to concatenate the ranks' tensors."""
        return self.engine.allgather(tensor, name)

    def mean(self, name: str, tensor: Tensor) -> Work:
        """Start to make the mean over ranks, in a new tensor."""
        tensor = tensor.contiguous()
        return self.engine.allreduce(tensor, empty_result_like(tensor), name, *self.mean_arguments)


class CompressorRound:
    """One request of each generator, on its way to all ranks.

    Gathers are packed into one message; reductions are fused by the engine.
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
        self._messages: Work | None = None
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
    first, *others = headers
    for rank, other in enumerate(others, start=1):
        for left, right in zip_longest(first.lines, other.lines, fillvalue="nothing more"):
            if str(left) != str(right):
                raise MismatchError(
                    f"the compressor asks for different things: rank 0: {left}; rank {rank}: "
                    f"{right}. What it yields must not depend on one rank's gradient"
                )
