# SPDX-License-Identifier: Apache-2.0
"""BucketWire: sends the gradients of a bucket: as they are, cast, or compressed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from torch_ring._C import Engine, Work
from torch_ring.collectives.reduce_op import Average, ReduceOp, Sum
from torch_ring.compression import Compression, Compressor
from torch_ring.compression.stateful import StatefulCompressor
from torch_ring.optimizer.buckets import Bucket
from torch_ring.optimizer.stateful_bucket import BucketCompression, StatefulBucket

__all__ = ["BucketWire", "FinishStage", "ReductionSettings", "bucket_memory", "wire_maker"]


@dataclass(frozen=True)
class ReductionSettings:
    """The settings for reducing one optimizer's gradients.

    Attributes:
        op: Average or Sum.
        predivide_factor: Average divides by this before the sum, by size / this after it.
        compression: compresses a bucket, or each gradient, before it is sent.
        bucket_bytes: the most bytes of a bucket, whose gradients are reduced together.
        direct_bytes: inside a host, backward writes a gradient of this size or larger straight into
            the memory in which it is reduced, if it is in no group and not compressed; 0: no
            gradient.
        sparse_as_dense: whether sparse gradients are reduced as dense ones.
        run_ahead: whether passes on devices may end without an agreement (`PlannedPasses`).
        shard_state: whether each rank steps a part of the parameters (`ShardedState`).
        nan_check: whether the ranks look for gradients that are not finite.
    """

    op: ReduceOp
    predivide_factor: float
    compression: Compressor | StatefulCompressor
    bucket_bytes: int
    direct_bytes: int = 0
    sparse_as_dense: bool = False
    run_ahead: bool = True
    shard_state: bool = False
    nan_check: bool = False

    def arguments(self, size: int) -> tuple[ReduceOp, float, float]:
        """Return the operator, the prescale and the postscale factor of an allreduce."""
        if self.predivide_factor == 1.0:
            return self.op, 1.0, 1.0
        return Sum, 1.0 / self.predivide_factor, self.predivide_factor / size

    def mean_arguments(self, size: int) -> tuple[ReduceOp, float, float]:
        """Return the same arguments for a mean, independent of `op`."""
        return replace(self, op=Average).arguments(size)

    def describe(self) -> str:
        """Return the settings as a line that must be the same on all ranks."""
        kind = self.compression
        if isinstance(kind, StatefulCompressor):
            name = str(kind)  # with its settings
        else:  # an instance's repr may contain an address
            name = (kind if isinstance(kind, type) else type(kind)).__qualname__
        return (
            f"{self.op.name}, gradient_predivide_factor={self.predivide_factor}, {name}, "
            f"bucket_bytes={self.bucket_bytes}, direct_bytes={self.direct_bytes}, "
            f"sparse_as_dense={self.sparse_as_dense}, run_ahead={self.run_ahead}, "
            f"nan_check={self.nan_check}{', shard_state=True' if self.shard_state else ''}"
        )

    @property
    def largest(self) -> float | None:
        """The largest magnitude that may be sent; None: it is not checked."""
        if not self.nan_check:
            return None
        wire_dtype = getattr(self.compression, "wire_dtype", None)
        return torch.finfo(wire_dtype).max if wire_dtype == torch.float16 else math.inf


FinishStage = Callable[[], bool]
"""Waits for a stage of a reduction; returns whether to call it again for another stage."""

Allreduce = Callable[[str, Tensor, bool], Work]
"""Starts an allreduce in place: its name, its tensor, whether the caller is about to wait."""


class BucketWire(Protocol):
    """Reduces one bucket in place."""

    is_launchable: bool
    """Whether it takes just one allreduce, of the bucket or of `buffer` with its values."""

    @property
    def buffer(self) -> Tensor | None:
        """Memory that is sent in place of the bucket, of the same length and another dtype."""

    def start(
        self, name: Callable[[int], str], memory: Tensor, touched: int, *, blocking: bool
    ) -> list[FinishStage]:
        """Start to reduce the touched gradients of the bucket.

        Args:
            name: returns the name of the operation that begins at an element of the bucket.
            memory: the bucket's memory, flat.
            touched: the bitmap of the parameters to reduce, in this and other buckets.
            blocking: whether the caller is about to wait.
        """


WireMaker = Callable[[Bucket, Callable[[int], Tensor]], BucketWire]
"""Makes the wire of a bucket; its second argument returns a parameter's view of the memory."""


class _RunBucket(ABC):
    """A bucket that sends each run of touched gradients separately."""

    is_launchable = True
    buffer: Tensor | None = None

    def __init__(self, bucket: Bucket, allreduce: Allreduce) -> None:
        self._bucket = bucket
        self._allreduce = allreduce

    def start(
        self, name: Callable[[int], str], memory: Tensor, touched: int, *, blocking: bool
    ) -> list[FinishStage]:
        """See `BucketWire`."""
        return [
            self._send(name(begin), memory, slice(begin, end), blocking)
            for begin, end in self._bucket.runs(touched)
        ]

    @abstractmethod
    def _send(self, name: str, memory: Tensor, run: slice, blocking: bool) -> FinishStage: ...

    def _part(self, memory: Tensor, run: slice) -> Tensor:
        is_whole = run.stop - run.start == self._bucket.numel
        return memory if is_whole else memory[run]


class PlainBucket(_RunBucket):
    """A bucket that is sent as it is."""

    def _send(self, name: str, memory: Tensor, run: slice, blocking: bool) -> FinishStage:
        work = self._allreduce(name, self._part(memory, run), blocking)

        def finish() -> bool:
            work.wait()
            return False

        return finish


class CastBucket(_RunBucket):
    """A bucket that is sent in another dtype, from a buffer of its own."""

    def __init__(self, bucket: Bucket, allreduce: Allreduce, buffer: Tensor) -> None:
        super().__init__(bucket, allreduce)
        self.buffer: Tensor = buffer

    def _send(self, name: str, memory: Tensor, run: slice, blocking: bool) -> FinishStage:
        part, buffer = self._part(memory, run), self._part(self.buffer, run)
        buffer.copy_(part)
        work = self._allreduce(name, buffer, blocking)

        def finish() -> bool:
            part.copy_(work.wait())
            return False

        return finish


class CompressedBucket(_RunBucket):
    """A bucket that a compressor without a state compresses anew in each pass."""

    is_launchable = False

    def __init__(self, bucket: Bucket, allreduce: Allreduce, compressor: Compressor) -> None:
        super().__init__(bucket, allreduce)
        self._compressor = compressor

    def _send(self, name: str, memory: Tensor, run: slice, blocking: bool) -> FinishStage:
        part = self._part(memory, run)
        compressed, context = self._compressor.compress(part)
        work = self._allreduce(name, compressed.contiguous(), blocking)

        def finish() -> bool:
            part.copy_(self._compressor.decompress(work.wait(), context))
            return False

        return finish


def wire_maker(
    settings: ReductionSettings,
    engine: Engine,
    size: int,
    named_parameters: Sequence[tuple[str, Tensor]],
) -> WireMaker:
    """Return the function that makes the wire of each bucket of one optimizer.

    Args:
        settings: choose the kind of wire.
        engine: the engine of the process set.
        size: the number of its ranks.
        named_parameters: the optimizer's, in the order of their indices.

    Raises:
        ValueError: a stateful compressor serves another optimizer already.
    """
    arguments = settings.arguments(size)
    compression = settings.compression

    def allreduce(name: str, tensor: Tensor, blocking: bool) -> Work:
        return engine.submit("allreduce", tensor, tensor, name, blocking, *arguments)

    if isinstance(compression, StatefulCompressor):
        scale = size if settings.op == Sum else 1
        shared = BucketCompression(
            compression, named_parameters, engine, settings.mean_arguments(size), scale
        )
        return lambda bucket, view_of: StatefulBucket(shared, bucket, view_of)
    if compression is Compression.none:
        return lambda bucket, _: PlainBucket(bucket, allreduce)
    stateless = compression  # known not to be stateful, in the function below too
    wire_dtype: torch.dtype | None = getattr(compression, "wire_dtype", None)

    def make(bucket: Bucket, _: Callable[[int], Tensor]) -> BucketWire:
        if wire_dtype is None or wire_dtype == bucket.dtype:
            return CompressedBucket(bucket, allreduce, stateless)
        return CastBucket(bucket, allreduce, bucket_memory(engine, bucket, wire_dtype))

    return make


def bucket_memory(engine: Engine, bucket: Bucket, dtype: torch.dtype) -> Tensor:
    """Return zeroed memory for a bucket on its device; on the CPU the ranks of a host share it."""
    if bucket.device.type != "cpu":
        return torch.zeros(bucket.numel, dtype=dtype, device=bucket.device)
    return engine.empty_shared((bucket.numel,), dtype).zero_()
