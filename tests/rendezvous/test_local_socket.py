"""The local socket through which the ranks of one host find rank 0."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from torch_ring.errors import RingError, TimeoutError
from torch_ring.rendezvous import local_socket, network
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.launchers import Identity


def test_only_processes_of_the_same_user_are_answered(monkeypatch):
    point = f"\0torch_ring test {os.getpid()}"
    with local_socket.serve(point, b"here"):
        assert local_socket.ask(point, Deadline(5.0)) == b"here"
        with (
            pytest.raises(RingError, match="says that it is rank 0"),
            local_socket.serve(point, b""),
        ):
            pass
        monkeypatch.setattr(network.os, "getuid", lambda: 12345)
        with pytest.raises(TimeoutError, match="rank 0 did not arrive on this host"):
            local_socket.ask(point, Deadline(0.2))
    with pytest.raises(TimeoutError):
        local_socket.ask(point, Deadline(0.1))


def test_the_launcher_is_the_nearest_ancestor_without_a_rank(monkeypatch):
    wrapper = subprocess.Popen(["sleep", "60"], env={"PMI_RANK": "1"})
    try:
        monkeypatch.setattr(local_socket, "_ancestors", lambda: iter([wrapper.pid, os.getpid()]))
        deadline = Deadline(10)
        while b"PMI_RANK" not in Path(f"/proc/{wrapper.pid}/environ").read_bytes():
            assert not deadline.passed()  # exec() shows the new environment a moment after it began
            time.sleep(0.001)
        hydra = local_socket._starter(Identity(1, 2, launcher="Hydra"))
        assert hydra.startswith(f"{os.getpid()}.")
        assert local_socket._starter(Identity(1, 2, launcher="init")).startswith(f"{wrapper.pid}.")
    finally:
        wrapper.kill()
        wrapper.wait()
    point = local_socket.socket_name
    assert point(Identity(0, 2, job="1")) == point(Identity(1, 2, job="1"))
    assert point(Identity(0, 2, job="1")) != point(Identity(0, 2, job="2"))


def test_where_processes_cannot_be_seen(monkeypatch):
    monkeypatch.setattr(local_socket, "_stat", lambda _: Path("/no/proc").read_text().split())
    with pytest.raises(RingError, match="cannot see the process that started this rank"):
        local_socket._starter(Identity(1, 2, launcher="Open MPI"))
