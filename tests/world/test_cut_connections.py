"""The network cuts connections between living ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from groups import on_ring
from pool import all_have_passed, error_of, eventually, run
from scripts import ROOT

import torch_ring as hvd

WHY = ", although both ranks live: a firewall, NAT or another device of the network may have cut it"
PATIENCE_S = 15.0  # of the other end, whose goodbye would come after the connection's error


def tcp_sockets() -> set[tuple[int, str]]:
    """Return this process's TCP connections: descriptors, which others get later, and names."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM:
                copy.getpeername()
                found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def tcp_sockets_before(folder: Path, rank: int) -> set[tuple[int, str]]:
    """Return rank 1's before rank 0 goes on, which may connect to it."""
    looked = folder / "looked"
    if rank == 0:
        assert eventually(looked.exists, 30)
    found = tcp_sockets()
    looked.touch()
    return found


def reset(fd: int) -> None:
    """Make the other end's next call fail with a reset connection."""
    nowhere = bytes(16)  # a sockaddr of AF_UNSPEC disconnects
    assert ctypes.CDLL(None).connect(fd, nowhere, len(nowhere)) == 0


def lose_a_data_connection(folder: Path) -> tuple[str, str]:
    hvd.init()
    pair = hvd.add_process_set([0, 1])  # whose connections are made when it is first used
    done, told = folder / "done", folder / "told"
    if hvd.rank() == 2:
        assert eventually(told.exists, 30)
        hvd.shutdown()
        return "", ""
    before = tcp_sockets_before(folder, hvd.rank())
    hvd.allreduce(torch.ones(100_000), process_set=pair)
    if hvd.rank() == 1:
        assert eventually((folder / "reduced").exists, 30)
        cut = tcp_sockets() - before
        assert cut
        for fd, _ in cut:
            reset(fd)
        done.touch()
        eventually(told.exists, PATIENCE_S)
        with contextlib.suppress(RuntimeError):
            try:
                raise RuntimeError("waited in vain")
            finally:
                hvd.shutdown()
        return "", ""
    (folder / "reduced").touch()
    assert eventually(done.exists, 30)
    error = error_of(lambda: hvd.allreduce(torch.ones(100_000), process_set=pair))
    told.touch()
    hvd.shutdown()
    return error


def test_a_data_connection_that_is_reset_is_told_while_the_other_rank_lives(tmp_path):
    (kind, text), _, _ = run(
        lose_a_data_connection, 3, args=[tmp_path], transport="tcp", initialized=False
    )
    assert kind == "PeerLostError"
    assert "connection to rank 1" in text, text
    assert f"reset by peer{WHY}" in text, text


def lose_all_connections(folder: Path) -> tuple[str, str]:
    """The network resets all connections of rank 1; return the error of the next collective."""
    before = tcp_sockets()
    hvd.init()
    hvd.allreduce(torch.ones(100_000))
    all_have_passed(folder / "joined", hvd.size())
    if hvd.rank() == 1:
        for fd, _ in tcp_sockets() - before:
            reset(fd)
    all_have_passed(folder / "reset", hvd.size())
    error = error_of(lambda: hvd.allreduce(torch.ones(100_000)))
    all_have_passed(folder / "told", hvd.size())
    hvd.shutdown()
    return error


@pytest.mark.parametrize("size", [2, 3])
def test_connections_that_are_all_reset_are_no_death(size, tmp_path):
    errors = run(lose_all_connections, size, args=[tmp_path], transport="tcp", initialized=False)
    for kind, text in errors:
        assert kind == "PeerLostError", text
        assert re.search(rf"connection to rank [0-2] .*{WHY}", text), text
        assert "died" not in text, text
    page = (ROOT / "docs" / "errors.md").read_text()
    assert f"reset by peer{WHY}" in page


def lose_the_connection_of_messages(folder: Path) -> str:
    before = tcp_sockets_before(folder, dist.get_rank())
    done, told = folder / "done", folder / "told"
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
        cut = tcp_sockets() - before
        assert cut
        for fd, _ in cut:
            reset(fd)
        done.touch()
        eventually(told.exists, PATIENCE_S)
        return ""
    dist.send(torch.zeros(1), 1)
    assert eventually(done.exists, 30)
    text = error_of(lambda: dist.send(torch.zeros(1 << 20), 1))[1]
    told.touch()
    return text


def test_a_messages_connection_that_is_reset_is_told_while_the_other_rank_lives(tmp_path):
    text, _ = on_ring(lose_the_connection_of_messages, 2, tmp_path, transport="tcp")
    assert "connection to rank 1" in text, text
    assert "reset by peer" in text or "Broken pipe" in text, text
    assert WHY in text, text
