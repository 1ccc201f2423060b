# SPDX-License-Identifier: Apache-2.0
"""Each rank has random numbers of its own, as docs/input-pipeline.md has the ranks seed them."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import run
from torch.utils.data import DataLoader, Dataset

import torch_ring as hvd
from torch_ring import checkpoint
from torch_ring.data import ShardedSampler

SEED = 7
FORK = multiprocessing.get_context("fork")


class Augmented(Dataset[Any]):
    """A sample's index, and the random numbers that an augmentation would draw for it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, tuple[float, float, float]]:
        return index, (torch.rand(1).item(), random.random(), float(np.random.rand()))


def numbers(begin: int, end: int) -> list[Any]:
    """Return each epoch's samples, augmentations and dropout mask of this rank."""
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # how long a worker may take to end
    torch.manual_seed(SEED)
    sampler = ShardedSampler(Augmented())
    options = {"num_workers": 1, "multiprocessing_context": FORK}
    loader = DataLoader(Augmented(), 2, sampler=sampler, **options)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    found = []
    for epoch in range(begin, end):
        sampler.set_epoch(epoch)
        torch.manual_seed(SEED + 100_000 * epoch + hvd.rank())
        samples, drawn = [], []
        for indices, values in loader:
            samples += indices.tolist()
            drawn += [value.tolist() for value in values]
        mask = [value == 0 for value in model(torch.ones(4)).tolist()]
        found.append((samples, drawn, mask))
    return found


def resumed() -> tuple[list[Any], list[Any]]:
    return numbers(0, 2), numbers(1, 2)


def test_ranks_draw_numbers_of_their_own():
    (first, first_again), (second, second_again) = run(resumed, 2)
    seen: list[Any] = []
    for of_first, of_second in zip(first, second, strict=True):
        assert sorted(of_first[0] + of_second[0]) == list(range(12))
        for drawn in (*of_first[1:], *of_second[1:]):
            assert drawn not in seen
            seen.append(drawn)
    assert first_again == first[1:]  # as if the job had not stopped
    assert second_again == second[1:]


def through_a_checkpoint(path: Path) -> tuple[float, float]:
    torch.manual_seed(SEED + hvd.rank())
    checkpoint.save(path, torch.get_rng_state())
    before = torch.rand(1).item()
    torch.set_rng_state(checkpoint.load(path))
    return before, torch.rand(1).item()


def test_a_checkpoint_has_the_generator_of_rank_0(tmp_path):
    first, second = run(through_a_checkpoint, 2, args=(tmp_path / "state",))
    assert first[0] != second[0]
    assert first[1] == second[1] == first[0]


def unseeded() -> list[float]:
    """Return a number for each try of a batch."""
    torch.manual_seed(SEED + hvd.rank())
    drawn = []
    rank = hvd.rank()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))

    @hvd.elastic.run
    def training(state: Any) -> None:
        while state.batch < 3:
            drawn.append(torch.rand(1).item())
            if rank == 1 and state.batch == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
            state.batch += 1

    training(hvd.elastic.TorchState(optimizer=optimizer, batch=0))
    return drawn


def test_a_repeated_batch_has_other_numbers():
    survivor, _ = run(unseeded, 2, may_die={1})
    torch.manual_seed(SEED)
    assert survivor == [pytest.approx(torch.rand(1).item()) for _ in range(4)]
