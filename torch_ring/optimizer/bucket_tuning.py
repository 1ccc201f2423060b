"""best_limits: the sizes of buckets with which a step model says that least is left to send. Pure.

The model is that of DDP: buckets are sent one after the other, none before its last gradient is
ready, and each takes a latency and its bytes over a bandwidth. What is not sent when backward ends
is exposed: the step is longer by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch_ring.optimizer.buckets import LAST_BUCKET_BYTES, Bucket

__all__ = [
    "Backward",
    "BucketLimits",
    "Prediction",
    "Transfer",
    "best_limits",
    "exposed_s",
    "predictions",
]

_CAPACITIES_BYTES = [1 << power for power in range(20, 29)]  # 1 to 256 MiB
_LAST_BYTES = [1 << power for power in range(16, 25, 2)]  # 64 KiB to 16 MiB


@dataclass(frozen=True)
class BucketLimits:
    """The most bytes of a bucket, and of the last one."""

    capacity_bytes: int
    last_bytes: int = LAST_BUCKET_BYTES

    def __str__(self) -> str:
        return f"{_mib(self.capacity_bytes)}, the last {_mib(self.last_bytes)}"


@dataclass(frozen=True)
class Transfer:
    """An allreduce of S bytes takes latency_s + S / bytes_per_s seconds."""

    latency_s: float
    bytes_per_s: float

    def time_s(self, size_bytes: float) -> float:
        """Return the seconds that so many bytes take."""
        return self.latency_s + size_bytes / self.bytes_per_s

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Transfer:
        """Return what two measurements say, each bytes and seconds; of more bytes the second."""
        (small_bytes, small_s), (large_bytes, large_s) = small, large
        per_byte_s = max(large_s - small_s, 1e-12) / (large_bytes - small_bytes)
        return cls(max(small_s - small_bytes * per_byte_s, 0.0), 1.0 / per_byte_s)


@dataclass(frozen=True)
class Backward:
    """A backward pass in time.

    Attributes:
        ready_s: by parameter, seconds from the first gradient until this one is ready.
        end_s: seconds from the first gradient to the last.
    """

    ready_s: Sequence[float]
    end_s: float


@dataclass(frozen=True)
class Prediction:
    """How long a step takes after backward with such buckets, in seconds."""

    limits: BucketLimits
    exposed_s: float


def exposed_s(plan: Sequence[Bucket], backward: Backward, transfer: Transfer) -> float:
    """Return the seconds that sending the buckets of a plan takes after backward has ended."""
    sent_s = 0.0
    for bucket in plan:
        ready_s = max(backward.ready_s[slot.parameter] for slot in bucket.slots)
        sent_s = max(sent_s, ready_s) + transfer.time_s(bucket.numel * bucket.dtype.itemsize)
    return max(sent_s - backward.end_s, 0.0)


def predictions(
    default: BucketLimits,
    plan_of: Callable[[BucketLimits], Sequence[Bucket]],
    backward: Backward,
    transfer: Transfer,
) -> list[Prediction]:
    """Return what the model says of the default limits, first, and of others."""
    return [
        Prediction(limits, exposed_s(plan_of(limits), backward, transfer))
        for limits in _candidates(default)
    ]


def best_limits(predicted: Sequence[Prediction]) -> Prediction:
    """Return the prediction with the least exposed time; of equal ones the first."""
    return min(predicted, key=lambda each: each.exposed_s)


def _candidates(default: BucketLimits) -> Iterator[BucketLimits]:
    yield default
    for capacity in reversed(_CAPACITIES_BYTES):  # of equal ones that with fewer buckets
        for last in _LAST_BYTES:
            if last <= capacity and BucketLimits(capacity, last) != default:
                yield BucketLimits(capacity, last)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):g} MiB"
