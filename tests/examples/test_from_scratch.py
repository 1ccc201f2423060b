"""The idea in one file: it ends with the weights of the real optimizer."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import scripts
import torch
from pool import run
from slow import slow
from torch import distributed

import torch_ring as hvd

TRAIN = scripts.ROOT / "examples" / "from_scratch" / "train.py"


def train_twice(store: str) -> None:
    """Train by the example's optimizer over gloo, then by ours."""
    example, rank, size = runpy.run_path(str(TRAIN)), hvd.rank(), hvd.size()
    torch.set_default_dtype(torch.float64)
    try:
        distributed.init_process_group(
            "gloo", store=distributed.FileStore(store, size), rank=rank, world_size=size
        )
        scratch, _ = example["train"](example["DistributedOptimizer"], rank, size)
        distributed.destroy_process_group()
        ours, loss = example["train"](hvd.DistributedOptimizer, rank, size)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss < 0.01
    for one, other in zip(ours.parameters(), scratch.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [slow(1), 2, slow(3)])
def test_ends_with_the_weights_of_the_real_optimizer(size: int, tmp_path: Path) -> None:
    run(train_twice, size, args=(str(tmp_path / "store"),))


def test_runs_as_a_script(tmp_path: Path) -> None:
    first, second = scripts.run(TRAIN, folder=tmp_path)
    biases = [
        re.findall(r"rank \d: loss 0\.00\d+, bias (\S+)", each.output) for each in (first, second)
    ]
    assert len(biases[0]) == 1
    assert biases[0] == biases[1]
