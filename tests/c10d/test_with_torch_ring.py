# SPDX-License-Identifier: Apache-2.0
"""torch_ring and torch.distributed in one program."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

import torch_ring as hvd
from tests.support.groups import default_group, on_ring
from tests.support.pool import expect_error, run


def without_launcher(backend: str) -> tuple[int, int]:
    """Return rank and size of a program whose processes know only their group."""
    with default_group(backend):
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            del os.environ[variable]
        hvd.init()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [3.0] * 3
        place = hvd.rank(), hvd.size()
        hvd.shutdown()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3
        return place


@pytest.mark.parametrize("backend", ["gloo", "ring"])
def test_init_takes_the_default_group(backend: str) -> None:
    places = run(without_launcher, 3, args=(backend,), initialized=False)
    assert places == [(0, 3), (1, 3), (2, 3)]


def world_of_group() -> tuple[int, int] | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    hvd.init(process_group=group)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    place = hvd.rank(), hvd.size()
    hvd.shutdown()
    return place


def test_init_takes_a_group() -> None:
    assert on_ring(world_of_group, 3) == [None, (0, 2), (1, 2)]


@on_ranks(2, by=on_ring)
def test_wrong_groups() -> None:
    for words, options in (
        ("no other argument", {"process_group": dist.group.WORLD, "rank": 0, "size": 2}),
        ("is no group of torch.distributed", {"process_group": [0, 1]}),
    ):
        expect_error("InvalidArgumentError", words, lambda o=options: hvd.init(**o))
