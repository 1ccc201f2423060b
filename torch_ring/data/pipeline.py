"""Hands out batches, real or not, and measures what waiting for them costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import cycle, islice, repeat
from typing import Any

import torch

from torch_ring.collectives.allreduce import allreduce
from torch_ring.collectives.barrier import barrier
from torch_ring.collectives.reduce_op import Max, Min
from torch_ring.data.prefetcher import DevicePrefetcher
from torch_ring.data.report import InputReport, Rates
from torch_ring.data.sampler import ShardedSampler
from torch_ring.data.waits import WaitLog
from torch_ring.data.workers import default_num_workers
from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["MODES", "InputPipeline"]

MODES = ("real", "cached", "synthetic")
"""For a script's ``--data``."""


class InputPipeline:
    """Iterates over a loader's batches, on a device, and tells what waiting for them costs.

    ::

        sampler = ShardedSampler(train_set, drop_last=True)
        loader = DataLoader(train_set, batch_size, sampler=sampler)
        pipeline = InputPipeline(loader, device, args.data)
        for epoch in range(epochs):
            for batch in pipeline:
                train_step(batch)
        report = pipeline.report(train_step)  # on all ranks
        if hvd.rank() == 0:
            print(report)

    An epoch has equally many batches in each mode. A batch may come again, so a step must not write
    to it. The loader's :class:`ShardedSampler` is advanced with every batch that the loop gets, and
    by the last one to the next epoch: its state, taken after a step, is right. (Not that of a
    ``batch_sampler=``, which alone knows how large its batches are.)

    Args:
        loader: a DataLoader, or an iterable of batches; see :class:`DevicePrefetcher`.
        device: where the batches are to go.
        mode: ``"real"``: what the loader yields; ``"cached"``: its first batches again and again,
            copied to the device each time; ``"synthetic"``: its first batch alone, which lies on
            the device.
        cached_batches: how many there are of those.
        process_set: the ranks that train together, and report together.

    Raises:
        ValueError: there is no such mode; in an iteration: there is no batch that could come again.
        TypeError: in an iteration that is not of real data: the loader has no length.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str = "cpu",
        mode: str = "real",
        *,
        cached_batches: int = 8,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(MODES)}")
        if cached_batches < 1:
            raise ValueError(f"cached_batches={cached_batches}: must be 1 or more")
        self.loader = loader
        self.device = torch.device(device)
        self.mode = mode
        self.cached_batches = cached_batches
        self.process_set = process_set
        self._prefetcher = DevicePrefetcher(loader, device)
        self._log = WaitLog()

    def __len__(self) -> int:
        """Return the loader's number of batches. Raises TypeError if it has none."""
        return len(self._prefetcher)

    def __iter__(self) -> Iterator[Any]:
        advance = _advancing(self.loader)
        batches = self._pass(self.mode)
        index, counted = -1, time.perf_counter()
        begun = counted
        try:
            for index, batch in enumerate(batches):
                here = time.perf_counter()
                self._log.add(here - begun, is_first=index == 0)
                self._log.add_elapsed(here - counted)
                counted = here
                advance(index)
                yield batch
                begun = time.perf_counter()
            if index < 0:  # after a resume: what was left did not fill a batch
                advance(index)
        finally:
            self._log.add_elapsed(time.perf_counter() - counted)

    def _pass(self, mode: str) -> Iterator[Any]:
        """Return the batches of an epoch."""
        if mode == "real":
            return iter(self._prefetcher)
        if mode == "cached":
            again = islice(cycle(self._cached), len(self))
            return iter(DevicePrefetcher(again, self.device))
        return repeat(self._synthetic, len(self))

    @cached_property
    def _cached(self) -> list[Any]:
        """The first batches of a whole epoch, as the loader yields them."""
        with _whole_epochs(self.loader):
            batches = list(islice(self.loader, self.cached_batches))
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
        """Tell what the run waited for, and compare real data with cached and synthetic data.

        A collective of all ranks of the set. To compare, the ranks take some 3 x `rounds` x `steps`
        more steps, so do it when the run is over: each round has some with each kind of data, and
        counts as the slowest rank's; the medians of the rounds are compared. The loader's workers
        are started for each round, and fill their queue during steps that do not count.

        Args:
            step: does a whole training step with a batch, and changes the weights accordingly.
                None: no comparison.
            steps: in a round, with each kind of data; the same on all ranks, as `rounds`.
            rounds: how many.

        Raises:
            ValueError: `steps` or `rounds` is less than 1.
        """
        if steps < 1 or rounds < 1:
            raise ValueError(f"steps={steps}, rounds={rounds}: both must be 1 or more")
        waits = self._log.gather(self.process_set)
        workers = getattr(self.loader, "num_workers", 0)
        counts = torch.tensor([workers, max(0, default_num_workers() - workers)])
        num_workers, spare = allreduce(counts, op=Min, process_set=self.process_set).tolist()
        rates = None if step is None else self._compare(step, steps, rounds)
        return InputReport(self.mode, self.process_set.size(), num_workers, spare, waits, rates)

    def _compare(self, step: Callable[[Any], object], steps: int, rounds: int) -> Rates:
        # Equally many on all ranks, as each step has collectives, though loaders may differ.
        queued = torch.tensor(_queue_of(self.loader))
        queue = int(allreduce(queued, op=Max, process_set=self.process_set))
        settling = {"real": 1 + queue, "cached": 1, "synthetic": 1}
        with _whole_epochs(self.loader):
            _ = self._synthetic  # it is loaded now, and not while something is timed
            self._end_workers()
            rows = [
                [self._time(mode, step, settling[mode], steps) for mode in MODES]
                for _ in range(rounds)
            ]
        seconds = torch.tensor(rows, dtype=torch.float64)
        return Rates.of(allreduce(seconds, op=Max, process_set=self.process_set), steps)

    def _time(self, mode: str, step: Callable[[Any], object], settling: int, steps: int) -> float:
        """Return what `steps` steps take, in seconds, after some that do not count."""
        batches = self._endless(mode)
        try:
            for batch in islice(batches, settling):
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
        """End the workers that stay; they would fill their queue while other data are timed."""
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
    """Return what advances the loader's sampler, called with the index of each batch."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ShardedSampler):
        return lambda _index: None
    sampler.load_state_dict(sampler.state_dict())  # len(loader) is now what is left of the epoch
    last, next_epoch = len(loader) - 1, sampler.epoch + 1  # type: ignore[arg-type]
    samples = loader.batch_size or 1  # type: ignore[attr-defined]  # without batches: one at a time

    def advance(index: int) -> None:
        if index == last:  # also where the loader leaves out a batch that is not full
            sampler.set_epoch(next_epoch)
        else:
            sampler.advance(samples)

    return advance


def _queue_of(loader: Iterable[Any]) -> int:
    """Return how many batches the loader's workers make in advance."""
    return getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 0)


@contextmanager
def _whole_epochs(loader: Iterable[Any]) -> Iterator[None]:
    """Have the loader's sampler begin at the beginning, and put it back."""
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
