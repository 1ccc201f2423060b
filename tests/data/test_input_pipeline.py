# SPDX-License-Identifier: Apache-2.0
"""The batches of each mode of an InputPipeline, and its report by a clock that tests move."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from on_ranks import on_ranks
from pool import run
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torch_ring as hvd
from torch_ring.data import (
    MODES,
    InputPipeline,
    InputReport,
    ShardedSampler,
    default_num_workers,
    prefetcher,
)
from torch_ring.data.pipeline import Rates, Waits
from torch_ring.setup import control_groups

FORK = multiprocessing.get_context("fork")  # for workers of ranks, which are themselves forked


class Clock:
    """A clock that tests move forward."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def take(self, seconds: float) -> None:
        self.now_s += seconds

    def ticking(self) -> Any:
        time = SimpleNamespace(perf_counter=lambda: self.now_s)
        return patch("torch_ring.data.pipeline.time", time)


class Samples(Dataset[int]):
    """Samples that each cost this rank some time."""

    def __init__(self, length: int, cost: Callable[[], object] = lambda: None) -> None:
        self.length = length
        self.cost = cost

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.cost()
        return index


@on_ranks(2)
def test_the_loop_gets_as_many_batches_in_each_mode() -> None:
    size = hvd.size()
    steps = 11
    for mode in MODES:
        data = Samples(steps * 2 * size + 1)  # the last batch is not full on one rank, and left out
        sampler = ShardedSampler(data)
        loader = DataLoader(data, 2, sampler=sampler, drop_last=True)
        pipeline = InputPipeline(loader, mode=mode)
        assert len(pipeline) == steps
        epochs = []
        for _ in range(2):
            batches = []
            for batch in pipeline:
                batches.append(tuple(batch.tolist()))
                if len(batches) == 3:
                    assert sampler.consumed == 3 * 2 * size
            epochs.append(batches)
            assert sampler.consumed == 0
        assert sampler.epoch == 2
        different = {"real": steps, "cached": 8, "synthetic": 1}[mode]
        for batches in epochs:
            assert len(batches) == steps
            assert len(set(batches)) == different
            assert batches[different:] == batches[: steps - different] or mode == "real"
        assert (epochs[0] == epochs[1]) == (mode != "real")

    # A loop stops, and goes on in another process: no sample is repeated or missed.
    sampler = ShardedSampler(12 * size, drop_last=True)
    loader = DataLoader(
        Samples(12 * size), 2, sampler=sampler, num_workers=1, multiprocessing_context=FORK
    )
    seen = []
    for batch in InputPipeline(loader):
        seen += batch.tolist()
        if len(seen) == 4:
            break
    other = ShardedSampler(12 * size, drop_last=True)
    other.load_state_dict(sampler.state_dict())
    rest = InputPipeline(DataLoader(Samples(12 * size), 2, sampler=other))
    assert len(rest) == 4
    for batch in rest:
        seen += batch.tolist()
    assert len(seen) == 12
    assert sorted(chain(*hvd.allgather_object(seen))) == list(range(12 * size))
    for batch in InputPipeline(loader):  # the same goes on, without set_epoch()
        seen += batch.tolist()
    assert sorted(seen[:4] + seen[12:]) == sorted(seen[:12])
    assert sampler.epoch == other.epoch == 1


def check_report() -> str:
    """Data take rank 1 three times as long as a step, ranks 0 and 2 half as long."""
    rank, size, clock = hvd.rank(), hvd.size(), Clock()
    data = Samples(1000 * size, lambda: clock.take(0.03 if rank == 1 else 0.005))
    sampler = ShardedSampler(data, drop_last=True)
    loader = DataLoader(data, None, sampler=sampler)
    pipeline = InputPipeline(loader)
    steps = 0

    def step(batch: int) -> None:
        nonlocal steps
        steps += 1
        hvd.allreduce(torch.ones(1))  # ranks that took different numbers of steps would hang
        clock.take(0.01)

    with clock.ticking():
        for index, batch in enumerate(pipeline):
            step(batch)
            if index == 99:
                break
        where = sampler.state_dict()
        assert where["consumed"] == 100 * size
        before = steps
        report = pipeline.report(step, steps=20, rounds=3)
        assert steps - before == 3 * 3 * (20 + 1)
        assert sampler.state_dict() == where
        alone = pipeline.report()
    assert hvd.allgather_object(report) == [report] * size
    waits, rates = report.waits, report.rates
    assert (report.mode, report.ranks, waits.steps) == ("real", size, 100)
    means = [0.005, 0.03, 0.005][:size]
    near = pytest.approx
    assert (waits.slowest_rank, waits.slowest_rank_s, waits.others_s) == (
        1,
        near(0.03),
        near(0.005),
    )
    assert waits.mean_s == near(sum(means) / size)
    for longest_s in (waits.p95_s, waits.max_s, waits.latest_s, waits.first_s):
        assert longest_s == near(0.03)
    assert waits.steps_per_s == near(1 / 0.04)
    assert (rates.real, rates.cached, rates.synthetic) == (near(25), near(100), near(100))
    assert (report.gap, report.loader_share, rates.spread) == (near(0.75), near(0.75), near(0))
    assert rates.steps == 60
    assert report.advice.startswith("rank 1 keeps the others waiting, 25.0 ms a step")
    assert alone == replace(report, rates=None)
    assert math.isnan(alone.gap)
    assert math.isnan(alone.loader_share)
    assert alone.advice == report.advice  # from the waits alone
    assert "gap" not in str(alone)

    # Ranks whose loaders have different queues still take equally many steps.
    prefetcher = rank  # none on rank 0
    processes = {"multiprocessing_context": FORK, "persistent_workers": True} if prefetcher else {}
    loader = DataLoader(Samples(64), 2, num_workers=prefetcher, **processes)
    report_of = InputPipeline(loader).report
    queue = 2 * (size - 1)
    before = steps
    report_of(step, steps=1, rounds=2)
    assert steps - before == 2 * (3 * (1 + 1) + queue)
    with pytest.raises(ValueError, match="rounds=0"):
        report_of(step, rounds=0)
    return str(report)


def test_report():
    text = run(check_report, 3)[0]
    assert "real 25.00, cached 100.00, synthetic 100.00 (medians; 60 steps of each)" in text
    assert "gap            75.0% +- 0.0%" in text
    assert "slowest rank   1, mean 30.0 ms" in text


def test_summary_of_waits():
    waits_s = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 1.0], [0.0, 0.0, 9.0]])
    got = Waits.of(
        7, torch.tensor([4.0, 2.0, 3.0]), torch.tensor([0.5, 0.1, 0.2]), waits_s, [2, 4, 6]
    )
    assert got.steps == 7
    assert got.steps_per_s == 2.0
    assert got.mean_s == pytest.approx(21 / 9)
    assert (got.p95_s, got.max_s) == (5.0, 9.0)
    assert got.latest_s == pytest.approx((5 + 2 + 9) / 3)
    assert (got.slowest_rank, got.slowest_rank_s, got.others_s) == (6, 3.0, 2.0)
    assert got.first_s == 0.5
    empty = Waits.of(1, torch.tensor([4.0]), torch.tensor([0.5]), torch.empty(1, 0), [0])
    assert (empty.steps, empty.slowest_rank) == (1, 0)
    assert math.isnan(empty.mean_s)


def test_rates_of_modes():
    seconds = torch.tensor([[4.0, 2.0, 1.0], [2.0, 1.0, 1.0], [8.0, 2.5, 1.0]])
    rates = Rates.of(seconds, 10)
    assert (rates.real, rates.cached, rates.synthetic, rates.steps) == (2.5, 5.0, 10.0, 30)
    report = replace(REPORT, rates=rates)
    assert (report.gap, report.loader_share) == (0.75, 0.5)
    assert rates.spread == pytest.approx((7 / 8 - 1 / 2) / 2)


WAITS = Waits(1000, 10.0, 0.01, 0.02, 0.03, 0.015, 1, 0.012, 0.01, 0.1)
RATES = Rates(real=10.0, cached=18.0, synthetic=20.0, spread=0.01, steps=100)
REPORT = InputReport("real", 4, 2, 0, WAITS, RATES)


@pytest.mark.parametrize(
    ("report", "advice"),
    [
        (replace(REPORT, rates=replace(RATES, steps=49)), "too few steps"),
        (replace(REPORT, rates=replace(RATES, spread=0.6)), "nothing to gain"),
        (replace(REPORT, rates=None, waits=replace(WAITS, latest_s=0.001)), "nothing to gain"),
        (replace(REPORT, waits=replace(WAITS, slowest_rank_s=0.05)), "rank 1 keeps"),
        (replace(REPORT, rates=replace(RATES, cached=11.0)), "it is the copy"),
        (replace(REPORT, spare_workers=3), r"more workers: DataLoader\(num_workers=5\)"),
        (replace(REPORT, waits=replace(WAITS, latest_s=0.03)), "a different rank is late"),
        (REPORT, "no CPU is free"),
        (replace(REPORT, rates=None), "no CPU is free"),
    ],
)
def test_advice_of_reports(report, advice):
    assert re.match(advice, report.advice), report.advice
    assert report.advice in str(report)
    assert "\n" not in report.advice


def test_a_gap_is_shown_where_it_tells_something():
    def gap(rates: Rates) -> str:
        (line,) = re.findall(r"^  gap +(.*)", str(replace(REPORT, rates=rates)), re.MULTILINE)
        return line

    assert gap(RATES) == "50.0% +- 1.0% (1 - real/synthetic), loader share 44.4% (1 - real/cached)"
    noisy = replace(RATES, real=25.56, spread=1.55)  # a gap of -27.8 %
    assert gap(noisy) == "none above the noise of +- 155.0%"
    assert gap(replace(noisy, steps=5)) == "too few steps to tell: 5 of each kind of data"


@on_ranks(1)
def test_an_epoch_ends_where_no_batch_is_left() -> None:
    """After a resume with larger batches, the rest of the epoch fills no batch."""
    for mode in ("real", "cached", "synthetic"):
        sampler = ShardedSampler(100, drop_last=True)
        state = sampler.state_dict() | {"consumed": 40}
        sampler.load_state_dict(state)
        pipeline = InputPipeline(
            DataLoader(range(100), 64, sampler=sampler, drop_last=True), mode=mode
        )
        assert [len(list(pipeline)) for _ in range(3)] == [0, 1, 1]
        assert (sampler.epoch, sampler.consumed) == (3, 0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(1000))


@on_ranks(2)
def test_a_report_needs_neither_an_end_nor_a_length() -> None:
    pipeline = InputPipeline(DataLoader(Stream(), 10))
    batches = iter(pipeline)
    for _ in range(3):
        next(batches)
    report = pipeline.report(lambda batch: batch.sum(), steps=2, rounds=1)
    assert report.waits.steps == 3
    assert report.waits.steps_per_s > 0
    assert report.rates is not None


def test_wrong_arguments_of_a_pipeline_are_refused():
    with pytest.raises(ValueError, match="real, cached, synthetic"):
        InputPipeline([1], mode="fast")
    with pytest.raises(ValueError, match="no batch"):
        list(InputPipeline([], mode="cached"))
    with pytest.raises(TypeError, match="len"):
        list(InputPipeline((batch for batch in [1, 2]), mode="synthetic"))


def count_workers(bound: bool) -> int:
    if bound:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["RANK"])]})
    hvd.init()
    with patch("os.sched_getaffinity", lambda _pid: set(range(8))):
        return default_num_workers()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two CPUs")
@pytest.mark.parametrize(("bound", "number"), [(True, 7), (False, 3)])
def test_ranks_divide_the_cpus_that_they_share(bound, number):
    assert run(count_workers, 2, args=(bound,), initialized=False) == [number] * 2


def test_default_num_workers():
    cpus = patch("os.sched_getaffinity", lambda _pid: set(range(8)))
    with cpus, patch.object(control_groups, "cpu_quota", lambda: math.inf):
        assert prefetcher.default_num_workers() == 7
        with patch.dict("os.environ", RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2"):
            assert prefetcher.default_num_workers() == 3
        assert prefetcher.default_num_workers(limit=2) == 2
    with cpus, patch.object(control_groups, "cpu_quota", lambda: 2.5):
        assert prefetcher.default_num_workers() == 1
