# SPDX-License-Identifier: Apache-2.0
"""Programs that do not import torch_ring: torch finds the backend by the entry points.

Each rank is a fresh interpreter with the environment of a torchrun rank; one ends without
destroy_process_group().
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from tests.support.groups import needs_torch_2_14
from tests.support.launcher_commands import DEADLINE_S, clean_environment

SIZE = 2


def is_installed() -> bool:
    try:
        importlib.metadata.distribution("torch_ring")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.skipif(not is_installed(), reason="torch_ring is not installed by pip")


def ranks_of(program: str, *arguments: str, **variables: str) -> list[tuple[int, str, str]]:
    """Run a program on two ranks; return by rank its exit code, output and errors."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = clean_environment(
        WORLD_SIZE=str(SIZE),
        LOCAL_WORLD_SIZE=str(SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="entry-points",
    )
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=environment | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


SUM = """
import sys, torch, torch.distributed as dist
print("known:", "ring" in dist.Backend.backend_list)
for backend in sys.argv[1:]:
    dist.init_process_group(None if backend == "default" else backend)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    group = dist.new_group(backend="gloo")
    of_cpu = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    if dist.get_rank() == 0:
        print(backend, dist.get_backend_config(), dist.get_backend(group), of_cpu, flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("autoload", ["1", pytest.param("0", marks=needs_torch_2_14)])
def test_ring_without_an_import(autoload: str) -> None:
    """By the entry points torch.backends and torch.distributed.backends; gloo stays gloo."""
    (status, out, err), other = ranks_of(
        SUM, "ring", "gloo", TORCH_DEVICE_BACKEND_AUTOLOAD=autoload, TORCH_RING_AS_GLOO="0"
    )
    assert (status, other[0]) == (0, 0), err + other[2]
    assert "torch.distributed uses torch_ring" not in err
    assert out.splitlines() == [
        f"known: {autoload == '1'}",
        "ring cpu:ring,cuda:ring gloo RingBackend",
        "gloo cpu:gloo,cuda:gloo gloo ProcessGroupGloo",
    ]


END = """
dist.init_process_group("ring")
groups = [dist.new_group(), dist.group.WORLD, dist.new_group()]
for group in groups:
    dist.barrier(group)
if dist.get_rank() == 1:
    raise ValueError("bad data")
for group in groups:
    try:
        dist.barrier(group)
    except RuntimeError as error:
        print(error)
dist.destroy_process_group()
"""


def test_in_place_of_gloo() -> None:
    """A later exception of rank 1 is told in all its groups."""
    (status, out, err), (other_status, _, other_err) = ranks_of(
        SUM + END, "gloo", "cpu:gloo", "default", TORCH_RING_AS_GLOO="1"
    )
    assert (status, other_status) == (0, 1), err + other_err
    for text in (err, other_err):
        assert text.count("torch.distributed uses torch_ring where a program asks for gloo") == 1
    lines = out.splitlines()
    assert lines[:4] == [
        "known: True",
        "gloo cpu:ring,cuda:ring gloo RingBackend",
        "cpu:gloo cpu:ring gloo RingBackend",
        "default cpu:ring gloo RingBackend",
    ]
    why = "left: ValueError: bad data at <string>:"
    assert [why in line for line in lines[4:]] == [True] * 3, lines


NEVER_DESTROYED = """
import torch, torch.distributed as dist
dist.init_process_group("ring")
group = dist.new_group()
work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
assert work.get_future().wait()[0].tolist() == [2.0, 2.0]  # by a thread of the group
left = dist.all_reduce(torch.ones(2), async_op=True)  # nobody waits for it
assert dist.get_rank() == 1 or dist.recv(torch.ones(1), 1) == 1
assert dist.get_rank() == 0 or dist.send(torch.ones(1), 0) is None
if dist.get_rank() == 1:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_program_that_destroys_nothing() -> None:
    first, (status, out, err) = ranks_of(NEVER_DESTROYED, TORCH_RING_LOG_LEVEL="warning")
    assert first == (0, "", "")
    assert (status, err) == (0, "")
    assert "rank 0" in out
    assert "has left" in out  # as with destroy_process_group(): it has not died
