# SPDX-License-Identifier: Apache-2.0
"""Autotuner: searches better bucket sizes for one optimizer, and keeps them if steps get faster."""

from __future__ import annotations

import csv
import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ring._C import Engine
from torch_ring.collectives.reduce_op import Average, Max, ReduceOp, Sum
from torch_ring.compression import Compressor
from torch_ring.compression.stateful import StatefulCompressor
from torch_ring.optimizer.buckets import LAST_BUCKET_BYTES, Bucket

__all__ = ["Autotuner", "BucketLimits", "PlanOf", "Transfer", "exposed_s", "predict", "untunable"]

_log = logging.getLogger("torch_ring")

_CAPACITIES_BYTES = [1 << power for power in range(28, 19, -1)]  # 256 to 1 MiB
_LAST_BYTES = [1 << power for power in range(16, 25, 2)]  # 64 KiB to 16 MiB

_MEASURED_PASSES = 5  # passes in which gradients are timed; the first one warms up the hooks
_BLOCK = 5  # passes with the same buckets in the trial; the first one is not counted
_TURNS = 2  # turns of the default and the better limits: 20 passes
_LEAST_GAIN = 0.01  # fraction of a step's time; a smaller gain is noise
_TIMED_BYTES = 4 << 10, 8 << 20  # sizes of the timed allreduces
_REPEATS = 5
_COLUMNS = ["optimizer", "bucket_bytes", "last_bucket_bytes", "exposed_s", "step_s"]


class BucketLimits(NamedTuple):
    """The most bytes of a bucket, and of the last one."""

    capacity_bytes: int
    last_bytes: int = LAST_BUCKET_BYTES

    def __str__(self) -> str:
        capacity, last = (f"{size_bytes / (1 << 20):g} MiB" for size_bytes in self)
        return f"{capacity}, the last {last}"


PlanOf = Callable[[BucketLimits], Sequence[Bucket]]


class Transfer(NamedTuple):
    """An allreduce of S bytes takes latency_s + S / bytes_per_s seconds."""

    latency_s: float
    bytes_per_s: float

    def time_s(self, size_bytes: float) -> float:
        """Return the seconds that an allreduce of `size_bytes` takes."""
        return self.latency_s + size_bytes / self.bytes_per_s

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Transfer:
        """Return the line through two measurements of (bytes, seconds)."""
        (small_bytes, small_s), (large_bytes, large_s) = small, large
        per_byte_s = max(large_s - small_s, 1e-12) / (large_bytes - small_bytes)
        return cls(max(small_s - small_bytes * per_byte_s, 0.0), 1.0 / per_byte_s)


def exposed_s(plan: Sequence[Bucket], ready_s: Sequence[float], transfer: Transfer) -> float:
    """Return the seconds of communication left after backward has ended.

    Args:
        plan: the buckets, in the order in which they are sent.
        ready_s: for each parameter, seconds from the first gradient until this one is ready.
        transfer: the speed of the network.
    """
    sent_s = 0.0
    for bucket in plan:
        bucket_ready_s = max(ready_s[slot.parameter] for slot in bucket.slots)
        sent_s = max(sent_s, bucket_ready_s) + transfer.time_s(bucket.numel * bucket.dtype.itemsize)
    return max(sent_s - max(ready_s), 0.0)


def predict(
    default: BucketLimits, plan_of: PlanOf, ready_s: Sequence[float], transfer: Transfer
) -> dict[BucketLimits, float]:
    """Return the exposed seconds with the default limits, which come first, and with others.

    Of equal times the first is the best: it has the fewest buckets.
    """
    others = [BucketLimits(most, last) for most in _CAPACITIES_BYTES for last in _LAST_BYTES]
    candidates = [default, *(each for each in others if each.last_bytes <= each.capacity_bytes)]
    return {limits: exposed_s(plan_of(limits), ready_s, transfer) for limits in candidates}


def untunable(
    compression: Compressor | StatefulCompressor, plan: Sequence[Bucket], overlaps: bool
) -> str | None:
    """Return the reason for not tuning the buckets of an optimizer; None: they are tuned.

    Args:
        compression: the compression of the optimizer's gradients.
        plan: its buckets.
        overlaps: whether gradients on the CPU are sent during backward.
    """
    if isinstance(compression, StatefulCompressor):
        return f"{compression} keeps a state for each"
    if any(bucket.device.type != "cpu" for bucket in plan):
        return "it is not known when a device has computed a gradient"
    if not overlaps:
        return "all ranks are on one host, where gradients are reduced when backward has ended"
    return None


class Autotuner:
    """Measures, computes the best limits of buckets, and tries them against the default.

    For some passes it notes when each gradient is ready. Then the ranks time two allreduces. From
    both they compute the limits with the least communication left after backward. These take turns
    with the default for 20 passes, and stay if they make a step shorter on the slowest rank.

    All ranks decide alike, since they reduce the measurements before they decide. A rank that has
    called join() counts as zero.

    Thread: the one that ends backward passes. Blocking: at the end of a pass, once, for two
    allreduces.

    Args:
        engine: the engine of the optimizer's process set.
        name: prefix of the operations' names; the same on all ranks, and unique.
        parameters: the parameters that have buckets.
        default: the present limits of the buckets.
        plan_of: returns the buckets within some limits.
        rebuild: makes those buckets, on all ranks in the same pass.
        tells: whether this rank logs the decision.
        log_path: path of a CSV file to which the considered sizes are appended; empty: none.

    Attributes:
        is_done: whether the decision has been made.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        parameters: Sequence[Tensor],
        default: BucketLimits,
        *,
        plan_of: PlanOf,
        rebuild: Callable[[BucketLimits], None],
        tells: bool,
        log_path: str,
    ) -> None:
        self._engine, self._name, self._default = engine, name, default
        self._plan_of, self._rebuild = plan_of, rebuild
        self._tells, self._log_path = tells, log_path
        self._ready_at: list[float | None] = [None] * len(parameters)
        self._passes: list[list[float]] = []  # per pass: when gradients were ready
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._note, index)
            )
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        self._predicted: dict[BucketLimits, float] = {}
        self._schedule: list[BucketLimits] = []  # limits for the remaining passes of the trial
        self._durations_s: dict[BucketLimits, list[float]] = {}
        self._operations = 0
        self._ended_at = 0.0
        self._seen = 0  # passes since the start
        self.is_done = False

    def pass_ended(self) -> None:
        """Note that a pass with gradients of the optimizer has ended, on all ranks."""
        now = time.perf_counter()
        if self._schedule:
            self._try(now)
        elif not self.is_done:
            self._measure()
        self._ended_at = time.perf_counter()

    def stop(self) -> None:
        """Go back to the default limits for good: a rank may have missed passes or decisions."""
        self._finish(self._default, {})

    # --- measurements

    def _note(self, index: int, _parameter: Tensor) -> None:
        self._ready_at[index] = time.perf_counter()

    def _measure(self) -> None:
        found = [at for at in self._ready_at if at is not None]
        if found:
            first, last = min(found), max(found)
            self._passes.append([(last if at is None else at) - first for at in self._ready_at])
        self._ready_at = [None] * len(self._ready_at)
        self._seen += 1
        if self._seen == _MEASURED_PASSES:
            self._remove_hooks()
            self._plan(self._timed_transfer(), self._common_ready_s())

    def _common_ready_s(self) -> list[float]:
        """Return the times when gradients are ready: the ranks' mean of their medians."""
        rows = self._passes[1:] or [[0.0] * len(self._ready_at)]
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        return self._reduced(medians, Average)

    def _timed_transfer(self) -> Transfer:
        medians_s = []
        for size_bytes in _TIMED_BYTES:
            values = torch.zeros(size_bytes // 4, dtype=torch.float32, device="cpu")
            times_s = []
            for _ in range(1 + _REPEATS):
                began = time.perf_counter()
                self._reduce(values, Sum)
                times_s.append(time.perf_counter() - began)
            medians_s.append(statistics.median(times_s[1:]))
        small, large = zip(_TIMED_BYTES, self._reduced(medians_s, Max), strict=True)
        return Transfer.through(small, large)

    def _reduced(self, values: Sequence[float], op: ReduceOp) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._reduce(tensor, op)
        reduced: list[float] = tensor.tolist()
        return reduced

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        name = f"{self._name}.{self._operations}"
        self._operations += 1
        self._engine.run("allreduce", tensor, tensor, name, -1, op)

    # --- the decision

    def _plan(self, transfer: Transfer, ready_s: Sequence[float]) -> None:
        self._transfer = transfer
        self._predicted = predict(self._default, self._plan_of, ready_s, transfer)
        default_s = self._predicted[self._default]
        best = min(self._predicted, key=lambda limits: self._predicted[limits])
        gain_s = default_s - self._predicted[best]
        if gain_s <= _LEAST_GAIN * (max(ready_s) + default_s):
            self._say(
                f"buckets of {self._default} stay: of {1e3 * max(ready_s):.3g} ms in which "
                f"gradients come, others would save {1e3 * gain_s:.2g} ms"
            )
            self._finish(self._default, {})
            return
        self._schedule = ([self._default] * _BLOCK + [best] * _BLOCK) * _TURNS
        self._durations_s = {self._default: [], best: []}

    def _try(self, now: float) -> None:
        """End a pass of the trial. `now`: when it ended, in seconds."""
        limits = self._schedule.pop(0)
        is_first_of_block = len(self._schedule) % _BLOCK == _BLOCK - 1
        if not is_first_of_block:
            self._durations_s[limits].append(now - self._ended_at)
        if not self._schedule:
            self._decide()
        elif self._schedule[0] != limits:
            self._rebuild(self._schedule[0])

    def _decide(self) -> None:
        default, better = self._durations_s
        medians_s = [statistics.median(each) for each in self._durations_s.values()]
        default_s, better_s = self._reduced(medians_s, Max)
        wins = better_s < (1 - _LEAST_GAIN) * default_s
        self._say(
            f"buckets of {better} {'replace' if wins else 'do not replace'} those of {default}: a "
            f"step takes {1e3 * better_s:.4g} ms, not {1e3 * default_s:.4g}; predicted were "
            f"{1e3 * self._predicted[better]:.3g} and {1e3 * self._predicted[default]:.3g} ms "
            f"after backward, with {1e3 * self._transfer.latency_s:.2g} ms an allreduce and "
            f"{self._transfer.bytes_per_s / 1e9:.3g} GB/s"
        )
        self._finish(better if wins else default, {default: default_s, better: better_s})

    def _finish(self, limits: BucketLimits, step_s: Mapping[BucketLimits, float]) -> None:
        if not self.is_done:
            self._write(step_s)
        self.is_done = True
        self._remove_hooks()
        self._schedule = []
        self._rebuild(limits)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _say(self, text: str) -> None:
        if self._tells:
            _log.info("autotune: %s", text)

    def _write(self, step_s: Mapping[BucketLimits, float]) -> None:
        """Write the predictions and measurements as CSV; bytes and seconds."""
        if not (self._tells and self._log_path and self._predicted):
            return
        try:
            with Path(self._log_path).open("a", newline="") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(_COLUMNS)
                for limits, left_s in self._predicted.items():
                    measured = f"{step_s[limits]:.6g}" if limits in step_s else ""
                    writer.writerow([self._name, *limits, f"{left_s:.6g}", measured])
        except OSError as error:
            _log.warning("autotune: %s cannot be written: %s", self._log_path, error)
