# SPDX-License-Identifier: Apache-2.0
"""Strangers at the socket where the ranks of a host meet, and followers that send garbage."""

import os
import socket
import time

import pytest
from exchanges import new_name, ranks_met
from threads import run_on_ranks
from torch.distributed import HashStore

from torch_ring.errors import RingError
from torch_ring.setup import frames, host_socket
from torch_ring.setup.network import require_same_user


def test_garbage_is_not_let_in_and_disturbs_nobody(monkeypatch):
    name, strangers = new_name(), []
    listen = host_socket.listen_unix

    def besieged(at):
        listener = listen(at)
        header = frames._HEADER.pack(b"tring1", frames.Kind.DATA, 0, 1 << 27)
        hello = frames._HEADER.pack(b"tring1", frames.Kind.HELLO, 0, 8)
        for noise in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n" * 9,
            header,
            hello,
            hello + b"\0\0\0\3" * 2,
        ) * 20:
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(at)
            stranger.sendall(noise)
            strangers.append(stranger)
        return listener

    monkeypatch.setattr("torch_ring.setup.host_socket.listen_unix", besieged)
    results = run_on_ranks(3, lambda rank: ranks_met(rank, 3, name=name))
    for stranger in strangers:
        stranger.close()
    assert results == [[0, 1, 2]] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_a_foreign_users_socket_is_not_believed(caplog):
    """A rank of a job with a store goes on alone; without one it raises an error at once."""
    name = new_name()
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(12345)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(name)
        listener.listen(16)
        os.write(ready[1], b"r")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        began = time.monotonic()
        with pytest.raises(RingError, match="in use by a process of user 12345: end it"):
            ranks_met(0, 2, name=name, timeout_s=60)
        assert time.monotonic() - began < 30
        store = HashStore()
        results = run_on_ranks(
            2, lambda rank: ranks_met(rank, 2, name=name, store=store, host=rank, timeout_s=5.0)
        )
        assert results == [[0, 1]] * 2
        assert "rank 1 goes on without the others of its host" in caplog.text
    finally:
        os.write(done[1], b"d")
        os.waitpid(child, 0)
        for end in (*ready, *done):
            os.close(end)


def test_only_processes_of_the_same_user_are_let_in(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        require_same_user(ours)
        monkeypatch.setattr("torch_ring.setup.network.os.getuid", lambda: 12345)
        with pytest.raises(PermissionError):
            require_same_user(ours)
