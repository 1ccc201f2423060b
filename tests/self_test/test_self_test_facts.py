"""Facts that the self-test shows, and the program of its ranks."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pool
import pytest
import torch

import torch_ring as hvd
from torch_ring.self_test import command, machine, rank
from torch_ring.setup import control_groups
from torch_ring.setup.exchange import FailurePath
from torch_ring.setup.network import address_of_interface


def check_wrong_sums() -> None:
    rank._check(1000, "cpu")
    right = rank.allreduce

    def wrong(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        result = right(tensor, **options)
        result[7] += 1
        return result

    message = "the allreduce of 1000 elements is wrong in 1 of them, the first is element 7: 30"
    with mock.patch.object(rank, "allreduce", wrong), pytest.raises(RuntimeError, match=message):
        rank._check(1000, "cpu")


def test_a_wrong_sum_is_seen() -> None:
    pool.run(check_wrong_sums, 2)


def test_the_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"memory.max": "max", "inner/memory.max": "1048576"}
    for name, text in groups.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(control_groups, "_ROOT", str(tmp_path))
    lines = control_groups._lines
    memberships = {"/proc/self/cgroup": ["4:memory:/", "3:cpu,cpuacct:/", "0::/inner"]}
    monkeypatch.setattr(control_groups, "_lines", lambda path: memberships.get(path) or lines(path))
    assert machine.machine()["memory_of_container_bytes"] == 1 << 20
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("524288\n")
    assert machine.machine()["memory_of_container_bytes"] == 1 << 19
    monkeypatch.setattr(control_groups, "_ROOT", str(tmp_path / "none"))
    assert machine.machine()["memory_of_container_bytes"] is None


def test_versions_of_launchers() -> None:
    hydra = "HYDRA build details:\n    Version:                                 4.2.1\n"
    assert machine._version(hydra) == "MPICH (Hydra) 4.2.1"
    assert machine._version("slurm 23.11.4\n") == "slurm 23.11.4"
    assert machine._version("mpirun (Open MPI) 5.0.8\n\nReport") == "mpirun (Open MPI) 5.0.8"


def test_a_run_without_shared_memory_says_why() -> None:
    why = "[torch_ring] rank 1 has no shared memory, so all ranks use TCP: `ulimit -v` allows 9 MiB"
    run = {
        **{"asked_transport": "auto", "ranks": 2, "failure": None, "transport": "tcp"},
        **{"gloo_problem": "torch has no gloo", "allreduce": []},
        "log": [why, "[torch_ring] 2 ranks, by TCP over 127.0.0.1"],
    }
    assert command.run_in_words(run).splitlines() == [
        "2 ranks, auto   allreduce is right, by tcp",
        f"                {why}",
        "  gloo          not compared: torch has no gloo",
    ]


def test_numbers_for_people() -> None:
    assert [command._bytes(n) for n in (None, 12, 3 << 20, 5 << 30, 2048 << 30)] == [
        "no limit",
        "12 bytes",
        "3 MiB",
        "5 GiB",
        "2048 GiB",
    ]


def test_a_machine_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown value is no limit, and no error; a kernel without IPv6 has no list of it."""

    def refuse(*args: Any, **options: Any) -> str:
        raise FileNotFoundError("there is no /proc")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(os, "getloadavg", refuse)
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    text = "\n".join(command._machine(machine.machine(), machine.limits(1)))
    for line in ("load not known", "memory +not known", r"/dev/shm +not known", "pages +not known"):
        assert re.search(rf"^ *(huge )?{line}", text, re.MULTILINE), text
    assert machine._loaded("libc") is None
    with pytest.raises(hvd.InvalidArgumentError, match="no-such-interface"):
        address_of_interface("no-such-interface")


# --- the estimate of descriptors


def connected() -> int:
    """Return how many connections this process has."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or one without a peer
            copy = socket.socket(fileno=os.dup(int(fd))) if _is_socket(fd) else None
            if copy is not None:
                with copy:
                    copy.getpeername()
                    count += 1
    return count


def _is_socket(fd: str) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")


def connections_after_alltoall() -> int:
    before = connected()
    hvd.init()
    hvd.alltoall(torch.ones(hvd.size() << 16))
    hvd.barrier()
    count = connected() - before
    hvd.barrier()
    hvd.shutdown()
    return count


def connections_in_init() -> int:
    """Return how many there are when the ranks of a host are still connected with their leader."""
    before, counts = connected(), []
    close = FailurePath.close

    def count_and_close(path: FailurePath) -> None:
        counts.append(connected())
        close(path)

    with mock.patch.object(FailurePath, "close", count_and_close):
        hvd.init()
    hvd.barrier()
    hvd.shutdown()
    return max(counts) - before


@pytest.mark.parametrize(
    ("count", "transport", "connections", "key"),
    [
        (connections_in_init, "shm", 1, "ranks_on_one_host"),
        (connections_after_alltoall, "tcp", 1, "hosts_of_an_alltoall"),
        (connections_after_alltoall, "tcp", 3, "hosts_of_an_alltoall"),
    ],
)
def test_descriptors_of_a_rank(
    count: Callable[[], int], transport: str, connections: int, key: str
) -> None:
    env = {"TORCH_RING_CONNECTIONS": str(connections)}
    two, three = (
        max(pool.run(count, size, transport=transport, env=env, initialized=False))
        for size in (2, 3)
    )
    of_a_rank = three - two - 1  # a control connection with each other rank: there are so few
    open_files = machine._OF_PROCESS + machine._CONTROL + 100 * of_a_rank
    with mock.patch("resource.getrlimit", return_value=(open_files, open_files)):
        assert machine.limits(connections)[key] == 101


def test_limits_that_are_none() -> None:
    with mock.patch("resource.getrlimit", return_value=(resource.RLIM_INFINITY,) * 2):
        found = machine.limits(1)
    assert found["ranks_on_one_host"] is found["hosts_of_an_alltoall"] is None
    text = "\n".join(command._machine(machine.machine(), found))
    assert "any number of open files: any number of ranks on one host" in text
