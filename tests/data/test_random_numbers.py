# SPDX-License-Identifier: Apache-2.0
"""Each rank has random numbers of its own, as docs/input-pipeline.md has the ranks seed them."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
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


class Augmented(Dataset[Any]):
    """A sample's index, and the random numbers that an augmentation would draw for it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, tuple[float, float, float]]:
        return index, (torch.rand(1).item(), random.random(), float(np.random.rand()))


def numbers(begin: int, end: int, *, own: bool) -> list[Any]:
    """Return each epoch's samples, augmentations and dropout mask of this rank."""
    torch.manual_seed(SEED)
    sampler = ShardedSampler(Augmented())
    loader = DataLoader(Augmented(), 2, sampler=sampler, num_workers=1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    found = []
    for epoch in range(begin, end):
        sampler.set_epoch(epoch)
        if own:
            torch.manual_seed(SEED + 100_000 * epoch + hvd.rank())
        samples, drawn = [], []
        for indices, values in loader:
            samples += indices.tolist()
            drawn += [value.tolist() for value in values]
        mask = [value == 0 for value in model(torch.ones(4)).tolist()]
        found.append((samples, drawn, mask))
    return found


def resumed(own: bool) -> tuple[list[Any], list[Any]]:
    return numbers(0, 3, own=own), numbers(2, 3, own=own)


def test_ranks_draw_numbers_of_their_own():
    (first, first_again), (second, second_again) = run(resumed, 2, args=(True,))
    seen: list[Any] = []
    for of_first, of_second in zip(first, second, strict=True):
        assert sorted(of_first[0] + of_second[0]) == list(range(12))
        for drawn in (*of_first[1:], *of_second[1:]):
            assert drawn not in seen
            seen.append(drawn)
    assert first_again == first[2:]  # as if the job had not stopped
    assert second_again == second[2:]


def test_other_ranks_repeat_no_numbers():
    before = run(partial(numbers, own=True), 4, args=(0, 2))
    after = run(partial(numbers, own=True), 2, args=(2, 4))
    masks = [mask for rank in (*before, *after) for _, _, mask in rank]
    assert all(masks.count(mask) == 1 for mask in masks)


def test_one_seed_gives_all_ranks_the_same_numbers():
    """The fault that the guide is against."""
    (first, _), (second, _) = run(resumed, 2, args=(False,))
    assert [epoch[1:] for epoch in first] == [epoch[1:] for epoch in second]


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


def seed_in_the_function(victims: set[int]) -> list[tuple[int, int, float]]:
    """Return size, rank and the first number of each call, and the number of a repeated batch."""
    drawn = []
    rank = hvd.rank()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))

    @hvd.elastic.run
    def training(state: Any) -> None:
        for state.epoch in range(state.epoch, 3):
            torch.manual_seed(SEED + 100_000 * state.epoch + hvd.rank())
            drawn.append((hvd.size(), hvd.rank(), torch.rand(1).item()))
            if rank in victims and state.epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()

    training(hvd.elastic.TorchState(optimizer=optimizer, epoch=0))
    return drawn


def test_survivors_seed_by_their_new_ranks():
    ended = run(seed_in_the_function, 3, args=({1},), may_die={1})
    first, last = ended[0], ended[2]
    places = [(3, 0), (3, 0), (2, 0), (2, 0)], [(3, 2), (3, 2), (2, 1), (2, 1)]
    assert ([each[:2] for each in first], [each[:2] for each in last]) == places
    for one, other in zip(first, last, strict=True):
        assert one[2] != other[2]


def unseeded(victims: set[int]) -> list[float]:
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
            if rank in victims and state.batch == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
            state.batch += 1

    training(hvd.elastic.TorchState(optimizer=optimizer, batch=0))
    return drawn


def test_a_repeated_batch_has_other_numbers():
    survivor, _ = run(unseeded, 2, args=({1},), may_die={1})
    torch.manual_seed(SEED)
    assert survivor == [pytest.approx(torch.rand(1).item()) for _ in range(4)]
