"""Autotuner: finds better sizes of one optimizer's buckets, and keeps them only if they win."""

from __future__ import annotations

import csv
import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_ring._C import Engine
from torch_ring.collectives.reduce_op import Average, Max, ReduceOp, Sum
from torch_ring.compression.stateful import StatefulCompressor
from torch_ring.optimizer.buckets import LAST_BUCKET_BYTES, Bucket
from torch_ring.optimizer.settings import ReductionSettings

__all__ = [
    "Autotuner",
    "Backward",
    "BucketLimits",
    "Transfer",
    "TuningTarget",
    "best_limits",
    "exposed_s",
    "predictions",
    "untunable",
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


_log = logging.getLogger("torch_ring")

_MEASURED_PASSES = 5  # whose gradients are timed; of the first, hooks are warming up
_BLOCK = 5  # passes with the same buckets in the trial; the first one is not counted
_TURNS = 2  # of the default and the better limits: 20 passes
_LEAST_GAIN = 0.01  # of a step's time: less is not told from noise
_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 8 << 20  # of allreduces that are timed
_REPEATS = 5


def untunable(settings: ReductionSettings, plan: Sequence[Bucket], overlaps: bool) -> str | None:
    """Return why the buckets of an optimizer are not tuned; None: they are.

    Args:
        settings: of the optimizer.
        plan: its buckets.
        overlaps: whether gradients on the CPU are sent during backward.
    """
    if isinstance(settings.compression, StatefulCompressor):
        return f"{settings.compression} keeps a state for each"
    if any(bucket.device.type != "cpu" for bucket in plan):
        return "it is not known when a device has computed a gradient"
    if not overlaps:
        return "all ranks are on one host, where gradients are reduced when backward has ended"
    return None


@dataclass(frozen=True)
class TuningTarget:
    """The optimizer whose buckets are tuned.

    Attributes:
        engine: of its process set.
        name: of operations on it; the same on all ranks, and no other's.
        parameters: those that have buckets.
        plan_of: returns the buckets within some limits.
        rebuild: makes those buckets, on all ranks in the same pass.
        tells: whether this rank logs.
        log_path: of a CSV file that this rank writes; empty: none.
    """

    engine: Engine
    name: str
    parameters: Sequence[Tensor]
    plan_of: Callable[[BucketLimits], Sequence[Bucket]]
    rebuild: Callable[[BucketLimits], None]
    tells: bool
    log_path: str = ""


class Autotuner:
    """Measures, computes the best limits of buckets, and tries them against the default.

    For some passes it notes when each gradient is ready. Then the ranks time two allreduces, and
    compute from both the limits with which the least is left to send when backward ends. These take
    turns with the default for 20 passes, and stay if a step is shorter with them, on the slowest
    rank.

    All ranks decide alike: what they decide by is reduced over them. A rank that has called join()
    counts as zero.

    Thread: the one that ends backward passes. Blocking: where passes end; for two allreduces once.

    Attributes:
        predicted: what the model says of the default, first, and of other limits; empty before.
        is_done: whether the buckets stay as they are.
    """

    def __init__(self, target: TuningTarget, default: BucketLimits) -> None:
        self._target = target
        self._default = default
        self._ready: list[float | None] = [None] * len(target.parameters)
        self._passes: list[Backward] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._note, index)
            )
            for index, parameter in enumerate(target.parameters)
            if parameter.requires_grad
        ]
        self.predicted: list[Prediction] = []
        self._transfer = Transfer(0.0, float("inf"))
        self._schedule: list[BucketLimits] = []  # of the passes of the trial that are still to come
        self._durations: dict[BucketLimits, list[float]] = {}
        self._operations = 0
        self._ended_at = 0.0
        self._seen = 0  # passes since the start
        self.is_done = False

    def pass_ended(self) -> None:
        """Note that a pass in which the optimizer took part has ended, on all ranks."""
        now = time.perf_counter()
        if not self.is_done:
            if self._schedule:
                self._try(now)
            else:
                self._measure()
        self._ended_at = time.perf_counter()

    def stop(self) -> None:
        """Go back to the default limits, for good: a rank may have missed passes, and decisions."""
        self._finish(self._default)

    # --- measurements

    def _note(self, index: int, _parameter: Tensor) -> None:
        self._ready[index] = time.perf_counter()

    def _measure(self) -> None:
        found = [at for at in self._ready if at is not None]
        if found:
            first, last = min(found), max(found)
            ready = [last - first if at is None else at - first for at in self._ready]
            self._passes.append(Backward(ready, last - first))
        self._ready = [None] * len(self._ready)
        self._seen += 1
        if self._seen == _MEASURED_PASSES:
            self._remove_hooks()
            self._transfer = self._timed_transfer()
            self._plan(self._common_backward())

    def _common_backward(self) -> Backward:
        """Return the pass of all ranks: the mean of their medians."""
        count = len(self._ready)
        rows = [[*each.ready_s, each.end_s] for each in self._passes[1:]]
        columns = zip(*rows, strict=True) if rows else [[0.0]] * (count + 1)
        medians = torch.tensor([statistics.median(each) for each in columns], dtype=torch.float64)
        *ready_s, end_s = self._reduced(medians, Average).tolist()
        return Backward(ready_s, end_s)

    def _timed_transfer(self) -> Transfer:
        medians = []
        for size_bytes in (_SMALL_BYTES, _LARGE_BYTES):
            tensor = torch.zeros(size_bytes // 4, dtype=torch.float32, device="cpu")
            times = []
            for _ in range(1 + _REPEATS):
                began = time.perf_counter()
                self._reduced(tensor, Sum)
                times.append(time.perf_counter() - began)
            medians.append(statistics.median(times[1:]))
        of_slowest = self._reduced(torch.tensor(medians, dtype=torch.float64), Max).tolist()
        return Transfer.through((_SMALL_BYTES, of_slowest[0]), (_LARGE_BYTES, of_slowest[1]))

    def _reduced(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """Reduce a tensor in place over the ranks."""
        name = f"{self._target.name}.{self._operations}"
        self._operations += 1
        work = self._target.engine.allreduce(tensor, tensor, name, op, 1.0, 1.0, blocking=True)
        work.wait()
        return tensor

    # --- the decision

    def _plan(self, backward: Backward) -> None:
        self.predicted = predictions(self._default, self._target.plan_of, backward, self._transfer)
        default, best = self.predicted[0], best_limits(self.predicted)
        gain_s = default.exposed_s - best.exposed_s
        if gain_s <= _LEAST_GAIN * (backward.end_s + default.exposed_s):
            self._say(
                f"buckets of {self._default} stay: of {1e3 * backward.end_s:.3g} ms in which "
                f"gradients come, others would save {1e3 * max(gain_s, 0.0):.2g} ms"
            )
            self._finish(self._default)
            return
        block = [self._default] * _BLOCK + [best.limits] * _BLOCK
        self._schedule = block * _TURNS
        self._durations = {self._default: [], best.limits: []}

    def _try(self, now: float) -> None:
        """End a pass of the trial. `now`: when it ended, in seconds."""
        limits = self._schedule.pop(0)
        is_first_of_block = len(self._schedule) % _BLOCK == _BLOCK - 1
        if not is_first_of_block:
            self._durations[limits].append(now - self._ended_at)
        if self._schedule:
            if self._schedule[0] != limits:
                self._target.rebuild(self._schedule[0])
            return
        self._decide()

    def _decide(self) -> None:
        default, better = self._durations
        medians = [statistics.median(self._durations[limits]) for limits in (default, better)]
        default_s, better_s = self._reduced(torch.tensor(medians).double(), Max).tolist()
        wins = better_s < (1 - _LEAST_GAIN) * default_s
        exposed = {each.limits: each.exposed_s for each in self.predicted}
        self._say(
            f"buckets of {better} {'replace' if wins else 'do not replace'} those of {default}: a "
            f"step takes {1e3 * better_s:.4g} ms, not {1e3 * default_s:.4g}; predicted were "
            f"{1e3 * exposed[better]:.3g} and {1e3 * exposed[default]:.3g} ms after backward, with "
            f"{1e3 * self._transfer.latency_s:.2g} ms an allreduce and "
            f"{self._transfer.bytes_per_s / 1e9:.3g} GB/s"
        )
        self._write({default: default_s, better: better_s})
        self._finish(better if wins else default)

    def _finish(self, limits: BucketLimits) -> None:
        self.is_done = True
        self._remove_hooks()
        if not self._durations:
            self._write({})
        self._schedule = []
        self._target.rebuild(limits)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # --- reports

    def _say(self, text: str) -> None:
        if self._target.tells:
            _log.info("autotune: %s", text)

    def _write(self, step_s: dict[BucketLimits, float]) -> None:
        """Write what was predicted, and measured, as CSV; bytes and seconds."""
        if not (self._target.log_path and self._target.tells and self.predicted):
            return
        try:
            with Path(self._target.log_path).open("a", newline="") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(
                        ["optimizer", "bucket_bytes", "last_bucket_bytes", "exposed_s", "step_s"]
                    )
                for each in self.predicted:
                    writer.writerow(
                        [
                            self._target.name,
                            each.limits.capacity_bytes,
                            each.limits.last_bytes,
                            f"{each.exposed_s:.6g}",
                            f"{step_s[each.limits]:.6g}" if each.limits in step_s else "",
                        ]
                    )
        except OSError as error:
            _log.warning("autotune: %s cannot be written: %s", self._target.log_path, error)
