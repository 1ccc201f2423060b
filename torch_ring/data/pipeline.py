"""InputPipeline: real, cached or synthetic batches, and the time that steps wait for them."""

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
    after any step. (A ``batch_sampler=`` is not advanced: it alone knows how large its batches
    are.)

    Args:
        loader: a DataLoader, or an iterable of batches: tensors, or tensors in tuples, lists and
            dicts, in any nesting.
        device: the device on which batches are handed out.
        mode: ``"real"``: the loader's batches; ``"cached"``: its first batches again and again,
            copied to the device each time; ``"synthetic"``: its first batch only, kept on the
            device.
        cached_batches: the number of batches that mode ``"cached"`` repeats.
        process_set: the ranks that train and report together; by default all.

    Raises:
        ValueError: `mode` is unknown, or `cached_batches` less than 1; in an iteration: the loader
            has no batch to repeat.
        TypeError: in an iteration of cached or synthetic data: the loader has no length.
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
            if index < 0:  # after a resume: the rest of the epoch did not fill a batch
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
        waits = self._log.gather(self.process_set)
        workers = getattr(self.loader, "num_workers", 0)
        counts = torch.tensor([workers, max(0, default_num_workers() - workers)], device="cpu")
        num_workers, spare = allreduce(counts, op=Min, process_set=self.process_set).tolist()
        rates = None if step is None else self._compare(step, steps, rounds)
        return InputReport(self.mode, self.process_set.size(), num_workers, spare, waits, rates)

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
    last, next_epoch = len(loader) - 1, sampler.epoch + 1  # type: ignore[arg-type]
    samples = loader.batch_size or 1  # type: ignore[attr-defined]  # None: single samples

    def advance(index: int) -> None:
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
