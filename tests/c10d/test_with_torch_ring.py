"""torch_ring and torch.distributed in one program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import torch_ring as hvd
from tests.support.groups import default_group, on_ring
from tests.support.launcher_commands import clean_environment
from tests.support.pool import error_of, run


def without_launcher(backend: str) -> tuple[int, int]:
    """Return rank and size of a program whose processes know nothing but their group."""
    with default_group(backend):
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            del os.environ[variable]
        hvd.init()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [3.0] * 3
        place = hvd.rank(), hvd.size()
        hvd.shutdown()
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


def wrong_groups() -> list[tuple[str, str]]:
    return [
        error_of(lambda: hvd.init(process_group=dist.group.WORLD, rank=0, size=2)),
        error_of(lambda: hvd.init(process_group=[0, 1])),
    ]


def test_wrong_groups() -> None:
    for first, second in on_ring(wrong_groups, 2):
        assert first[0] == second[0] == "InvalidArgumentError"
        assert "no other argument" in first[1]
        assert "is no group of torch.distributed" in second[1]


AS_GLOO = """
import sys, torch, torch.distributed as dist
from torch_ring.c10d.registration import autoload
autoload()
for backend in sys.argv[1:]:
    dist.init_process_group(None if backend == "default" else backend)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    group = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        print(backend, dist.get_backend_config(), dist.get_backend(group), flush=True)
    dist.destroy_process_group()
"""


def run_as_gloo(value: str, *backends: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, "--no-python", sys.executable, "-c", AS_GLOO, *backends],
        env=clean_environment(TORCH_RING_AS_GLOO=value),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_in_place_of_gloo() -> None:
    ended = run_as_gloo("1", "gloo", "cpu:gloo", "default")
    assert ended.returncode == 0, ended.stderr
    assert "torch.distributed uses torch_ring" in ended.stderr
    assert ended.stdout.split("\n")[:-1] == [
        "gloo cpu:ring,cuda:ring ring",
        "cpu:gloo cpu:ring ring",
        "default cpu:ring ring",
    ]


@pytest.mark.slow
def test_gloo_stays_by_default() -> None:
    ended = run_as_gloo("0", "gloo")
    assert ended.returncode == 0, ended.stderr
    assert "torch.distributed uses torch_ring" not in ended.stderr
    assert ended.stdout == "gloo cpu:gloo,cuda:gloo gloo\n"
