# SPDX-License-Identifier: Apache-2.0
"""InputPipeline: real, cached or synthetic batches, and the time that steps wait for them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice, repeat
from typing import Any

import torch
from torch import Tensor

from torch_ring.collectives.allgather import allgather
from torch_ring.collectives.allreduce import allreduce
from torch_ring.collectives.barrier import barrier
from torch_ring.collectives.reduce_op import Max, Min
from torch_ring.data.prefetcher import DevicePrefetcher, default_num_workers
from torch_ring.data.sampler import ShardedSampler
from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["MODES", "InputPipeline", "InputReport", "Rates", "Waits"]

_KEPT = 4096  # most recent steps: enough for a p95, and 32 KiB a rank to gather
_CACHED = 8  # batches that mode "cached" repeats
_SMALL = 0.02  # fraction of a step below which a gap is not worth fixing
_FEW = 50  # steps; measurements over fewer are mostly noise


@dataclass(frozen=True)
class Waits:
    """The waits of a run's steps for their batches, in seconds. The same on all ranks.

    An epoch's first step counts in `steps` and in `first_s` only. Means over no steps are NaN.

    Attributes:
        steps: the number of steps on the rank with the fewest.
        steps_per_s: the rate of the slowest rank; time outside the loops over batches is left out.
        mean_s, p95_s, max_s: over all ranks and the last 4096 steps.
        latest_s: the longest wait of any rank in a step, averaged over the steps: the time that a
            step loses, because all ranks wait for the latest.
        slowest_rank, slowest_rank_s: the rank that waits longest on average, and its mean wait.
        others_s: the median of the other ranks' mean waits.
        first_s: the wait for an epoch's first batch, while the workers start: the mean over the
            epochs, of the rank where it is longest.
    """

    steps: int
    steps_per_s: float
    mean_s: float
    p95_s: float
    max_s: float
    latest_s: float
    slowest_rank: int
    slowest_rank_s: float
    others_s: float
    first_s: float

    @classmethod
    def of(
        cls, steps: int, rates: Tensor, firsts_s: Tensor, waits_s: Tensor, ranks: list[int]
    ) -> Waits:
        """Return the statistics of the ranks' measurements.

        Args:
            steps: the number of steps on the rank with the fewest.
            rates: shape [ranks]; steps a second.
            firsts_s: shape [ranks]; mean waits for an epoch's first batch.
            waits_s: shape [ranks, steps]; waits of the other steps.
            ranks: the ranks of the set, ascending.
        """
        first_s, rate = firsts_s.max().item(), rates.min().item()
        if waits_s.shape[1] == 0:
            nan = math.nan
            return cls(steps, rate, nan, nan, nan, nan, ranks[0], nan, nan, first_s)
        of_ranks = waits_s.mean(1)
        return cls(
            steps=steps,
            steps_per_s=rate,
            mean_s=waits_s.mean().item(),
            p95_s=waits_s.flatten().sort().values[int(0.95 * (waits_s.numel() - 1))].item(),
            max_s=waits_s.max().item(),
            latest_s=waits_s.max(0).values.mean().item(),
            slowest_rank=ranks[int(of_ranks.argmax())],
            slowest_rank_s=of_ranks.max().item(),
            others_s=of_ranks.sort().values[:-1].median().item() if len(ranks) > 1 else math.nan,
            first_s=first_s,
        )


@dataclass(frozen=True)
class Rates:
    """Steps a second with each kind of data, of all ranks together.

    Attributes:
        real: with the loader's batches.
        cached: with a few of its batches again and again: no loader.
        synthetic: with one batch kept on the device: no loader and no copy.
        spread: half the distance from the smallest to the largest gap of the rounds.
        steps: the number of steps measured with each kind.
    """

    real: float
    cached: float
    synthetic: float
    spread: float
    steps: int

    @classmethod
    def of(cls, seconds: Tensor, steps: int) -> Rates:
        """Return the rates measured in some rounds.

        Args:
            seconds: shape [rounds, 3]: the duration of a round's steps with each kind of data, in
                the order of the attributes.
            steps: steps of a round with each kind.
        """
        real, cached, synthetic = (steps / seconds.median(0).values).tolist()
        gaps = 1 - seconds[:, 2] / seconds[:, 0]
        spread = ((gaps.max() - gaps.min()) / 2).item()
        return cls(real, cached, synthetic, spread, steps * len(seconds))


@dataclass(frozen=True)
class InputReport:
    """The measurements of :meth:`InputPipeline.report`, the same on all ranks. Print it.

    Attributes:
        mode: the run's data: real, cached or synthetic.
        ranks: the number of ranks.
        num_workers: workers of a rank's loader; the fewest of any rank.
        spare_workers: workers that :func:`default_num_workers` would add; the fewest of any rank.
        waits: the run's waits for data.
        rates: the speeds with each kind of data, measured after the run; None without `step`.
    """

    mode: str
    ranks: int
    num_workers: int
    spare_workers: int
    waits: Waits
    rates: Rates | None

    @property
    def gap(self) -> float:
        """The part of the speed lost to the data, 1 - real / synthetic; NaN if not compared."""
        return 1 - self.rates.real / self.rates.synthetic if self.rates else math.nan

    @property
    def loader_share(self) -> float:
        """The loader's part of that, 1 - real / cached; the rest is the copy's."""
        return 1 - self.rates.real / self.rates.cached if self.rates else math.nan

    @property
    def advice(self) -> str:
        """The first thing to try, in one line."""
        waits, rates = self.waits, self.rates
        if (rates or waits).steps < _FEW:
            return f"too few steps to tell: measure {_FEW} or more"
        lost = self.gap if rates else waits.latest_s * waits.steps_per_s
        if not lost > max(_SMALL, rates.spread if rates else 0.0):
            return "nothing to gain: the data keep up with the model"
        behind_s = waits.slowest_rank_s - waits.others_s
        if behind_s > max(waits.others_s, _SMALL / waits.steps_per_s):
            return (
                f"rank {waits.slowest_rank} keeps the others waiting, {_ms(behind_s)} a step more "
                "than they need: look at its host, its disk and its share of the data"
            )
        if self.loader_share < self.gap / 2:
            return (
                "it is the copy to the device rather than the loader: DataLoader(pin_memory=True), "
                "and smaller types (uint8 for images)"
            )
        if self.spare_workers > 0:
            return f"more workers: DataLoader(num_workers={self.num_workers + self.spare_workers})"
        if self.num_workers > 0 and waits.latest_s > 2 * waits.slowest_rank_s:
            return (
                "a different rank is late in each step: longer queues even that out, "
                "DataLoader(prefetch_factor=8)"
            )
        return (
            "no CPU is free for more workers: cheaper transforms (torchvision.transforms.v2 on "
            "uint8, on the device, or once before training), smaller files"
        )

    def __str__(self) -> str:
        waits, rates = self.waits, self.rates
        lines = [
            f"input pipeline: {waits.steps} steps with {self.mode} data on {self.ranks} "
            f"rank{'s' * (self.ranks > 1)}"
            + (f", {waits.steps_per_s:.2f} steps/s" if waits.steps else ""),
            f"  wait for data  mean {_ms(waits.mean_s)}, p95 {_ms(waits.p95_s)}, max "
            f"{_ms(waits.max_s)}; latest rank of a step {_ms(waits.latest_s)}; first batch of an "
            f"epoch {_ms(waits.first_s)}",
            f"  slowest rank   {waits.slowest_rank}, mean {_ms(waits.slowest_rank_s)}",
        ]
        if rates and rates.steps < _FEW:
            lines.append(
                f"  gap            too few steps to tell: {rates.steps} of each kind of data"
            )
        elif rates:
            gap = f"none above the noise of +- {rates.spread:.1%}"
            if self.gap > rates.spread:
                gap = (
                    f"{self.gap:.1%} +- {rates.spread:.1%} (1 - real/synthetic), "
                    f"loader share {self.loader_share:.1%} (1 - real/cached)"
                )
            lines += [
                f"  steps/s        real {rates.real:.2f}, cached {rates.cached:.2f}, synthetic "
                f"{rates.synthetic:.2f} (medians; {rates.steps} steps of each)",
                f"  gap            {gap}",
            ]
        return "\n".join([*lines, f"  advice         {self.advice}"])


def _ms(seconds: float) -> str:
    return "none" if math.isnan(seconds) else f"{1000 * seconds:.1f} ms"


MODES = ("real", "cached", "synthetic")
"""The modes of an InputPipeline, for a script's ``--data``."""


class InputPipeline:
    """Iterates over a loader's batches on a device, and measures how long steps wait for them.

    ::

        sampler = ShardedSampler(train_set)
        loader = DataLoader(train_set, batch_size, sampler=sampler)
        pipeline = InputPipeline(loader, device, args.data)
        for epoch in range(epochs):
            for batch in pipeline:
                train_step(batch)
        report = pipeline.report(train_step)  # on all ranks
        if hvd.rank() == 0:
            print(report)

    An epoch has the same number of batches in every mode. A batch may be handed out again, so a
    step must not write to it. Every batch that the loop gets advances the loader's
    :class:`ShardedSampler`, the last one to the next epoch, so the sampler's state may be saved
    after any step. (A ``batch_sampler=`` is not advanced: only itself knows the sizes of its
    batches.)

    Args:
        loader: a DataLoader, or an iterable of batches: tensors, or tensors in tuples, lists and
            dicts, in any nesting.
        device: the device on which batches are handed out.
        mode: ``"real"``: the loader's batches; ``"cached"``: its first 8 batches again and again,
            copied to the device each time; ``"synthetic"``: its first batch only, kept on the
            device.
        process_set: the ranks that train and report together; by default all.

    Raises:
        ValueError: `mode` is unknown; in an iteration: the loader has no batch to repeat.
        TypeError: in an iteration of cached or synthetic data: the loader has no length.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str = "cpu",
        mode: str = "real",
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(MODES)}")
        self.loader = loader
        self.device = torch.device(device)
        self.mode = mode
        self.process_set = process_set
        self._prefetcher = DevicePrefetcher(loader, device)
        self._steps = 0
        self._elapsed_s = 0.0  # in loops over batches, waits included
        self._first_s: list[float] = []  # waits for the first batch of an epoch
        self._last_s: deque[float] = deque(maxlen=_KEPT)  # waits for other batches

    def __len__(self) -> int:
        """Return the loader's number of batches. Raises TypeError if it has none."""
        return len(self._prefetcher)

    def __iter__(self) -> Iterator[Any]:
        advance = _advancing(self.loader)
        if self.mode == "real":
            batches = iter(self._prefetcher)
        else:
            _ = self._synthetic  # loaded now, not while the first step waits
            batches = islice(self._endless(self.mode), len(self))
        index, counted = -1, time.perf_counter()
        begun = counted
        try:
            for index, batch in enumerate(batches):
                here = time.perf_counter()
                (self._last_s if index else self._first_s).append(here - begun)
                self._steps += 1
                self._elapsed_s += here - counted
                counted = here
                advance(index)
                yield batch
                begun = time.perf_counter()
            if index < 0:  # after a resume: the rest of the epoch did not fill a batch
                advance(index)
        finally:
            self._elapsed_s += time.perf_counter() - counted

    @cached_property
    def _cached(self) -> list[Any]:
        """The first batches of a whole epoch, as the loader yields them."""
        with _whole_epochs(self.loader):
            batches = list(islice(self.loader, _CACHED))
        if not batches:
            raise ValueError("the loader has no batch, and none can come again")
        return batches

    @cached_property
    def _synthetic(self) -> Any:
        """One batch, on the device."""
        batch = self._cached[0]
        return batch if self.device.type == "cpu" else self._prefetcher.to_device(batch)

    # --- the report

    def report(
        self,
        step: Callable[[Any], object] | None = None,
        *,
        steps: int = 20,
        rounds: int = 5,
    ) -> InputReport:
        """Return the run's waits for data, and the speeds with real, cached and synthetic data.

        A collective of all ranks of the set. The comparison takes about 3 x `rounds` x `steps` more
        steps, so call it when the run is over. Each round takes `steps` steps with each kind of
        data and counts the slowest rank's time; the medians of the rounds are compared. The
        loader's workers start anew in each round, and fill their queue during untimed steps.

        Args:
            step: takes a whole training step with a batch, and so changes the weights. None: no
                comparison.
            steps: steps of a round with each kind of data; the same on all ranks, as `rounds`.
            rounds: the number of rounds.

        Returns:
            The report, the same on all ranks.

        Raises:
            ValueError: `steps` or `rounds` is less than 1.
        """
        if steps < 1 or rounds < 1:
            raise ValueError(f"steps={steps}, rounds={rounds}: both must be 1 or more")
        waits = self._gather_waits()
        workers = getattr(self.loader, "num_workers", 0)
        counts = torch.tensor([workers, max(0, default_num_workers() - workers)], device="cpu")
        num_workers, spare = allreduce(counts, op=Min, process_set=self.process_set).tolist()
        rates = None if step is None else self._compare(step, steps, rounds)
        return InputReport(self.mode, self.process_set.size(), num_workers, spare, waits, rates)

    def _gather_waits(self) -> Waits:
        counts = torch.tensor([self._steps, len(self._last_s)], device="cpu")
        steps, kept = allreduce(counts, op=Min, process_set=self.process_set).tolist()
        rate = steps / self._elapsed_s if steps else math.nan
        first_s = sum(self._first_s) / len(self._first_s) if self._first_s else math.nan
        mine = list(self._last_s)[len(self._last_s) - kept :]  # the same steps on all ranks
        row = torch.tensor([[rate, first_s, *mine]], dtype=torch.float64, device="cpu")
        table = allgather(row, process_set=self.process_set)  # [ranks, 2 + kept]
        ranks = self.process_set.ranks or []
        return Waits.of(steps, table[:, 0], table[:, 1], table[:, 2:], ranks)

    def _compare(self, step: Callable[[Any], object], steps: int, rounds: int) -> Rates:
        # The same number of steps on all ranks: a step has collectives, and loaders may differ.
        queued = torch.tensor(_queue_of(self.loader), device="cpu")
        queue = int(allreduce(queued, op=Max, process_set=self.process_set))
        untimed = {"real": 1 + queue, "cached": 1, "synthetic": 1}
        with _whole_epochs(self.loader):
            _ = self._synthetic  # loaded now, not while steps are timed
            self._end_workers()
            rows = [
                [self._time(mode, step, untimed[mode], steps) for mode in MODES]
                for _ in range(rounds)
            ]
        seconds = torch.tensor(rows, dtype=torch.float64, device="cpu")
        return Rates.of(allreduce(seconds, op=Max, process_set=self.process_set), steps)

    def _time(self, mode: str, step: Callable[[Any], object], untimed: int, steps: int) -> float:
        """Return the seconds that `steps` steps take, after `untimed` steps that do not count."""
        batches = self._endless(mode)
        try:
            for batch in islice(batches, untimed):
                step(batch)
            self._synchronize()
            barrier(self.process_set)
            begun = time.perf_counter()
            for batch in islice(batches, steps):
                step(batch)
            self._synchronize()
            return time.perf_counter() - begun
        finally:
            batches.close()
            self._end_workers()

    def _end_workers(self) -> None:
        """End persistent workers: they would fill their queue while other data are timed."""
        if getattr(self.loader, "persistent_workers", False):
            self.loader._iterator = None  # type: ignore[attr-defined]

    def _endless(self, mode: str) -> Generator[Any, None, None]:
        if mode == "cached":
            yield from DevicePrefetcher(cycle(self._cached), self.device)
        if mode == "synthetic":
            yield from repeat(self._synthetic)
        while True:
            is_empty = True
            for batch in self._prefetcher:
                is_empty = False
                yield batch
            if is_empty:
                raise ValueError("the loader has no batch, or can be used only once")

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _advancing(loader: Iterable[Any]) -> Callable[[int], None]:
    """Return a function that advances the loader's sampler; call it with each batch's index."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ShardedSampler):
        return lambda _index: None
    sampler.load_state_dict(sampler.state_dict())  # len(loader) now counts the rest of the epoch
    samples = loader.batch_size or 1  # type: ignore[attr-defined]  # None: single samples
    last = next_epoch = None

    def advance(index: int) -> None:
        nonlocal last, next_epoch
        if last is None:  # with the first batch: a StatefulDataLoader goes to its place before it
            last, next_epoch = len(loader) - 1, sampler.epoch + 1  # type: ignore[arg-type]
        if index == last:  # even if the loader drops an incomplete batch
            sampler.set_epoch(next_epoch)
        else:
            sampler.advance(samples)

    return advance


def _queue_of(loader: Iterable[Any]) -> int:
    """Return the number of batches that the loader's workers make in advance."""
    return getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 0)


@contextmanager
def _whole_epochs(loader: Iterable[Any]) -> Iterator[None]:
    """Make iterations inside the context begin at an epoch's start; restore the sampler after."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ShardedSampler):
        yield
        return
    state = sampler.state_dict()
    sampler.set_epoch(sampler.epoch + 1)
    try:
        yield
    finally:
        sampler.load_state_dict(state)
