"""Step: a training step in time, its computation and its transfers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from layers import Job

from torch_ring.config import Config
from torch_ring.optimizer.buckets import TensorSpec, plan_buckets

FUSION_BYTES = 64 << 20  # Horovod's buffer
CYCLE_S = 0.005  # Horovod's ranks agree on ready tensors once in a cycle


@dataclass(frozen=True)
class Link:
    """A link of two ranks: bytes a second, and seconds of an empty message."""

    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, and the time when the last is ready."""

    bytes: float
    ready_s: float


@dataclass(frozen=True)
class Step:
    """One GPU's computation in a step, and the buckets that become ready, in order."""

    compute_s: float
    buckets: tuple[Bucket, ...]

    def time_s(self, transfer_s: Callable[[float], float], slowdown: float = 0.0) -> float:
        """Return the time of a step in which the buckets are sent one after the other.

        Args:
            transfer_s: the transfer time of a number of bytes.
            slowdown: the relative slowdown of computation during communication.
        """
        end = 0.0
        for bucket in self.buckets:
            end = max(end, bucket.ready_s * (1 + slowdown)) + transfer_s(bucket.bytes)
        return max(self.compute_s * (1 + slowdown), end)


def ring_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Return the time of a ring allreduce: 2 (n - 1) steps, each with an n-th of the bytes."""
    return 2 * (ranks - 1) * (size_bytes / ranks / link.bandwidth + link.latency_s)


def horovod_step(job: Job, fusion_bytes: int) -> Step:
    """Fill fusion buffers with float32 gradients in the order in which they become ready.

    A ready gradient waits for half a cycle on average.
    """
    buckets: list[Bucket] = []
    for parameter, ready in reversed(list(zip(job.parameters, job.ready_s(), strict=True))):
        size_bytes, seen = 4.0 * parameter.numel, ready + CYCLE_S / 2
        if buckets and buckets[-1].bytes + size_bytes <= fusion_bytes:
            buckets[-1] = Bucket(buckets[-1].bytes + size_bytes, seen)
        else:
            buckets.append(Bucket(size_bytes, seen))
    return Step(job.compute_s, tuple(buckets))


def torch_ring_step(job: Job, wire: torch.dtype) -> Step:
    """Return the step with the buckets that DistributedOptimizer plans, sent as `wire`."""
    ready = job.ready_s()
    specs = [TensorSpec(p.numel, torch.float32, torch.device("cpu")) for p in job.parameters]
    plan = plan_buckets(specs, range(len(specs) - 1, -1, -1), Config().bucket_bytes)
    buckets = [
        Bucket(bucket.numel * wire.itemsize, max(ready[slot.parameter] for slot in bucket.slots))
        for bucket in plan
    ]
    return Step(job.compute_s, tuple(buckets))
