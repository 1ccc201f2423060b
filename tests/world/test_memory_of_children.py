"""Memory of forked children: they do not keep the shared memory of their parent's host."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from pool import FORKS, eventually, run
from shared import NAME, is_shared
from torch import nn
from torch.optim import SGD

import torch_ring as hvd


def holds_memory(pid: int | str) -> bool:
    """Return whether a process has mapped the memory of a host, or has its descriptor."""
    process = Path(f"/proc/{pid}")
    opened = [os.readlink(fd) for fd in (process / "fd").iterdir() if fd.is_symlink()]
    return NAME in (process / "maps").read_text() or any(NAME in name for name in opened)


def fork_and_touch() -> None:
    """A child reads zeros in its parent's shared memory, and writes to a copy of its own."""
    weight = nn.Parameter(torch.zeros(100_000))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=0.1))
    (weight * 3).sum().backward()
    shared = hvd.empty_shared(1000).fill_(5.0)
    assert is_shared(weight.grad)
    assert is_shared(shared)
    assert holds_memory("self")
    child = os.fork()
    if child == 0:
        passed = not holds_memory("self")
        for tensor in (weight.grad, shared):
            passed = passed and bool(tensor.eq(0).all())
            tensor.fill_(7.0)
            passed = passed and bool(tensor.eq(7).all())
        weight.grad = None
        (weight * 2).sum().backward()
        optimizer.zero_grad()
        passed = passed and not holds_memory("self")
        os._exit(0 if passed else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert weight.grad.eq(3).all()
    assert shared.eq(5).all()
    optimizer.step()
    optimizer.zero_grad()
    (weight * 4).sum().backward()
    assert weight.grad.eq(4).all()


def test_a_child_has_none_of_its_parents_shared_memory():
    run(fork_and_touch, 2, kind=FORKS)


def load_data_and_die() -> None:
    weight = nn.Parameter(torch.zeros(100_000))
    hvd.DistributedOptimizer(SGD([weight], lr=0.1))
    weight.sum().backward()
    loader = torch.utils.data.DataLoader(
        torch.arange(100.0), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    workers = [worker.pid for worker in batches._workers]
    Path(os.environ["WORKERS"]).write_text(" ".join(map(str, workers)))
    assert holds_memory("self")
    assert eventually(Path(os.environ["STOPPED"]).exists)
    os.kill(os.getpid(), signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def look_at_workers() -> None:
    parents = hvd.allgather_object(os.getpid())
    if hvd.rank() == 1:
        load_data_and_die()
    weight = nn.Parameter(torch.zeros(100_000))
    hvd.DistributedOptimizer(SGD([weight], lr=0.1))
    weight.sum().backward()
    path = Path(os.environ["WORKERS"])
    assert eventually(lambda: path.exists() and len(path.read_text().split()) == 2, 20.0)
    workers = [int(pid) for pid in path.read_text().split()]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # otherwise it ends when it notices its parent's death
    Path(os.environ["STOPPED"]).touch()
    assert eventually(lambda: parents[1] not in map(parent_of, workers))
    held = [holds_memory(worker) for worker in workers]
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    assert held == [False] * 2


def test_a_worker_that_outlives_its_parent_keeps_no_shared_memory(tmp_path):
    env = {name.upper(): str(tmp_path / name) for name in ("workers", "stopped")}
    run(look_at_workers, 2, env=env, may_die={1})
