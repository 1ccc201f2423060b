# SPDX-License-Identifier: Apache-2.0
"""Process sets that overlap, on stand-ins for GPUs that run one operation of NCCL at a time.

Ranks that enqueue the operations of two sets in different orders would wait for one another for
ever. The order depends on timing, so each program takes many steps.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import device_double
import pytest
import torch
from device_runs import run_on_double
from many_parameters import make_parameters, zero_loss
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import torch_ring as hvd

TIMEOUT_S = "30"  # ends an endless wait of a device


@contextlib.contextmanager
def one_at_a_time(device: str) -> Iterator[None]:
    """Make the stand-in of NCCL run one operation at a time, as a GPU does."""
    if device != device_double.DEVICE:
        yield
        return
    with device_double.faults() as faults:
        faults.serial = 1
        yield


def run_serially(program: Callable[[str], object], size: int) -> None:
    env = {"TORCH_RING_TIMEOUT": TIMEOUT_S, "TORCH_RING_BUCKET_BYTES": "16384"}
    run_on_double(program, size, **env)


def sum_in_random_orders(device: str, sets: Sequence[hvd.ProcessSet], steps: int) -> None:
    """Sum over all sets of this rank at once; each rank begins and ends them in its own order."""
    chance = random.Random(hvd.rank())
    mine = [each for each in sets if each.included()]
    results: list[tuple[Tensor, int]] = []
    for _ in range(steps):
        handles: list[tuple[int, int]] = []
        for place in chance.sample(range(len(mine)), len(mine)):
            tensor = torch.full((1000,), float(1 + hvd.rank()), device=device)
            handle = hvd.allreduce_async(tensor, op=hvd.Sum, process_set=mine[place])
            handles.append((handle, sum(1 + rank for rank in mine[place].ranks)))
        for handle, expected in chance.sample(handles, len(handles)):
            result: Tensor = hvd.synchronize(handle)
            results.append((result, expected))
    for result, expected in results:
        assert (result.cpu() == expected).all()


def use_sets_in_a_circle(device: str) -> None:
    with one_at_a_time(device):
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [2, 3], [0, 3], [0, 2])]
        sum_in_random_orders(device, [*sets, hvd.global_process_set], 40)
        hvd.shutdown()


def add_sets_while_the_device_works(device: str) -> None:
    """The world's device and its pending operations are older than the first set."""
    with one_at_a_time(device):
        for round_ in range(5):
            tensor = torch.ones(1000, device=device)
            pending = [
                hvd.allreduce_async(tensor, name=f"early.{i}", op=hvd.Sum)
                for i in range(2 * round_)
            ]
            sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2])]
            sum_in_random_orders(device, [*sets, hvd.global_process_set], 5)
            for handle in pending:
                assert (hvd.synchronize(handle).cpu() == hvd.size()).all()
            for each in sets:
                hvd.remove_process_set(each)
            hvd.shutdown()
            hvd.init()


SUMS = [(use_sets_in_a_circle, 4), (add_sets_while_the_device_works, 3)]


@pytest.mark.parametrize(
    ("program", "size"),
    SUMS,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_sums_of_overlapping_sets(program, size):
    run_serially(program, size)


def train_with_two_optimizers(device: str) -> None:
    """All ranks average the trunk, ranks 0 and 1 the branch; one pass fills the buckets of both."""
    with one_at_a_time(device):
        size, rank, steps = hvd.size(), hvd.rank(), 12
        pair = hvd.add_process_set([0, 1])
        trunk, branch = make_parameters(device, 8), make_parameters(device, 8)
        optimizers: list[Optimizer] = [
            hvd.DistributedOptimizer(SGD(trunk, lr=1.0), named("trunk", trunk)),
            hvd.DistributedOptimizer(SGD(branch, lr=1.0), named("branch", branch), process_set=pair)
            if pair.included()
            else SGD(branch, lr=1.0),
        ]
        for step in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            pairs = zip(branch, trunk, strict=True)
            losses = [zero_loss([each], float(step * (rank + 1))) for two in pairs for each in two]
            sum(losses).backward()
            for optimizer in optimizers:
                optimizer.step()
        total = sum(range(steps))
        assert all((each.cpu() == -total * (size + 1) / 2).all() for each in trunk)
        mine = 1.5 if pair.included() else rank + 1
        assert all((each.cpu() == -total * mine).all() for each in branch)
        hvd.shutdown()


def named(prefix: str, parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{index}", each) for index, each in enumerate(parameters)]


def test_two_optimizers_on_overlapping_sets():
    run_serially(train_with_two_optimizers, 3)
