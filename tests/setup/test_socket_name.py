# SPDX-License-Identifier: Apache-2.0
"""The name of the socket at which the ranks of one host meet."""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore

from torch_ring.errors import RingError
from torch_ring.setup import proc
from torch_ring.setup import socket_name as names
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline
from torch_ring.setup.socket_name import socket_name, socket_name_by_store

ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_the_launcher_is_the_nearest_ancestor_without_a_rank(monkeypatch):
    wrapper = subprocess.Popen(["sleep", "60"], env={"PMI_RANK": "1"})
    try:
        monkeypatch.setattr(names, "ancestors", lambda _: iter([wrapper.pid, os.getpid()]))
        deadline = Deadline(10)
        while b"PMI_RANK" not in Path(f"/proc/{wrapper.pid}/environ").read_bytes():
            assert not deadline.passed()  # exec() shows the new environment a moment after it began
            time.sleep(0.001)
        for launcher, pid in (("Hydra", os.getpid()), ("init", wrapper.pid)):
            assert names._starter(Identity(0, 2, launcher=launcher)).startswith(f"{pid}.")
    finally:
        wrapper.kill()
        wrapper.wait()


def test_ranks_of_a_job_have_one_name_and_jobs_have_their_own():
    job = Identity(0, 4, local_size=2, node="0", launcher="torchrun", job="1")
    name = socket_name(job, ADDRESS)
    assert name.startswith("\0torch_ring/")
    assert len(name) < 108  # the kernel's limit
    assert socket_name(replace(job, rank=1, local_rank=1), ADDRESS) == name
    others = [
        socket_name(replace(job, job="2"), ADDRESS),
        socket_name(replace(job, node="1"), ADDRESS),
        socket_name(job.among((0, 1)), ADDRESS),
        socket_name(job, ADDRESS | {"MASTER_PORT": "29501"}),
        socket_name(replace(job, launcher="env"), ADDRESS),
    ]
    assert len({name, *others}) == 6


def test_an_address_names_a_job_without_a_launcher(monkeypatch):
    def no_starter(_):
        raise AssertionError("the address is enough: ranks may have been started from two shells")

    monkeypatch.setattr(names, "_starter", no_starter)
    by_hand = Identity(0, 2, launcher="env")
    assert socket_name(by_hand, ADDRESS) == socket_name(replace(by_hand, rank=1), ADDRESS)


def test_where_processes_cannot_be_seen(monkeypatch):
    monkeypatch.setattr(proc, "stat_of", lambda _: Path("/no/proc").read_text().split())
    with pytest.raises(RingError, match="cannot see the process that started this rank"):
        socket_name(Identity(1, 2, launcher="Open MPI"), {})


def test_a_store_gives_its_ranks_one_name():
    store = HashStore()
    name = socket_name_by_store(PrefixStore("a", store))
    assert name == socket_name_by_store(PrefixStore("a", store))
    assert name != socket_name_by_store(PrefixStore("b", store))
