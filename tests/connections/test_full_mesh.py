"""The full mesh: every connection and descriptor arrives, and no stranger gets in."""

import asyncio
import contextlib
import itertools
import os
import socket
import time
from dataclasses import replace
from functools import partial

import pytest
from threads import run_on_ranks
from torch.distributed import HashStore, PrefixStore

from torch_ring.config import Config
from torch_ring.connections import connect, connector, handshake
from torch_ring.connections.connect import connect_full_mesh, meet
from torch_ring.errors import (
    InvalidArgumentError,
    MismatchError,
    RingError,
    TimeoutError,
)
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.exchange import failing_together
from torch_ring.rendezvous.launchers import Identity
from torch_ring.rendezvous.meeting import Meeting
from torch_ring.rendezvous.meeting_name import meeting_name_by_store
from torch_ring.rendezvous.store import given_store

CONFIG = Config(init_timeout_s=30.0)


def connect_rank(store, rank, size, config=CONFIG, host=""):
    """Connect one rank, as init() does."""
    identity, deadline = Identity(rank, size), Deadline(config.init_timeout_s)
    place = given_store(store, identity)
    with (
        contextlib.closing(
            Meeting(identity, deadline, place, meeting_name_by_store(PrefixStore(host, store)))
        ) as meeting,
        failing_together(meeting),
    ):
        mesh = connect_full_mesh(
            identity, config, "127.0.0.1", meeting, partial(meet, meeting, config, {})
        )
        everyone_is_through(store, size)
        return mesh


def everyone_is_through(store, size):
    """Stand in for the barrier of the engines: until then, ranks tell one another of failures."""
    store.add("through", 1)
    end = time.monotonic() + 10
    while store.add("through", 0) < size and time.monotonic() < end:
        time.sleep(0.01)


def connect_all_ranks(size, hosts=None, **more):
    store, hosts = HashStore(), hosts or [0] * size
    return run_on_ranks(
        size, lambda rank: connect_rank(store, rank, size, host=f"host {hosts[rank]}", **more)
    )


@pytest.fixture
def put_on_hosts(monkeypatch):
    """Return a function that puts the ranks on hosts, as far as the mesh can tell."""

    def put(hosts):
        make = connect._own_info
        monkeypatch.setattr(
            connect,
            "_own_info",
            lambda identity, *rest: replace(
                make(identity, *rest), machine=f"host {hosts[identity.rank]}"
            ),
        )

    return put


def check_sockets(first: int, second: int) -> None:
    """Check that two descriptors are the ends of one connection."""
    with socket.socket(fileno=first) as one, socket.socket(fileno=second) as other:
        for a, b in ((one, other), (other, one)):
            a.sendall(b"hello")
            b.setblocking(True)
            assert b.recv(5) == b"hello"
            assert not os.get_inheritable(a.fileno())


@pytest.mark.parametrize(
    ("hosts", "transport", "connections"),
    [
        ([0, 0], "shm", 1),
        ([0, 0, 0, 0], "auto", 1),
        ([0, 0], "tcp", 1),
        ([0, 1, 0, 1], "auto", 1),
        ([0, 1, 1], "auto", 3),
        ([0, 1, 2], "auto", 2),
    ],
)
def test_every_descriptor_arrives(put_on_hosts, hosts, transport, connections):
    put_on_hosts(hosts)
    size = len(hosts)
    meshes = connect_all_ranks(
        size, hosts, config=replace(CONFIG, transport=transport, connections=connections)
    )
    fds = [m.release() for m in meshes]
    host_of = list(range(size)) if transport == "tcp" else hosts
    lanes = min(host_of.count(host) for host in host_of)
    lane = [host_of[:rank].count(host) for rank, host in enumerate(host_of)]
    for a, b in itertools.combinations(range(size), 2):
        check_sockets(fds[a]["control"][b], fds[b]["control"][a])
        if host_of[a] != host_of[b] and lane[a] == lane[b] < lanes:
            ours, theirs = fds[a]["data"][b], fds[b]["data"][a]
            assert len(ours) == connections
            for pair in zip(ours, theirs, strict=True):
                check_sockets(*pair)
        else:
            assert fds[a]["data"][b] == fds[b]["data"][a] == []
    memories = [f["memory"] for f in fds]
    if len(set(host_of)) == size:
        assert memories == [-1] * size
    else:
        files = [(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in memories]
        for a, b in itertools.product(range(size), repeat=2):
            assert (files[a] == files[b]) == (host_of[a] == host_of[b])
        for fd in memories:
            assert not os.get_inheritable(fd)
            os.close(fd)
    assert all(m.host_of == host_of for m in meshes)


def test_silent_and_noisy_strangers_are_ignored(monkeypatch):
    strangers = []
    listen = {"_listen_tcp": connect._listen_tcp, "_listen_unix": connect._listen_unix}

    def besieged(name):
        def make(*arguments):
            listener = listen[name](*arguments)
            hello = handshake._HELLO.pack(handshake._MAGIC, 1, 1, 0, bytes(32))
            for noise in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, hello, hello + bytes(32)) * 10:
                stranger = socket.socket(listener.family)
                stranger.connect(listener.getsockname())
                stranger.sendall(noise)
                strangers.append(stranger)
            return listener

        return make

    for name in listen:
        monkeypatch.setattr(connect, name, besieged(name))
    monkeypatch.setattr(connector, "_STRANGER_S", 1e6)  # no stranger is dropped for silence
    for transport in ("shm", "tcp"):
        for m in connect_all_ranks(3, config=replace(CONFIG, transport=transport)):
            assert len(m.control) == 2
            m.close()
    for stranger in strangers:
        stranger.close()


def test_different_secrets_are_refused_on_all_ranks():
    store = HashStore()
    errors = run_on_ranks(
        2, lambda rank: connect_rank(store, rank, 2, replace(CONFIG, secret=f"of rank {rank}"))
    )
    assert all(isinstance(error, RingError) for error in errors)
    assert all("is TORCH_RING_SECRET the same on all ranks?" in str(error) for error in errors)


def test_different_settings_are_named_on_all_ranks():
    store = HashStore()
    errors = run_on_ranks(
        3, lambda rank: connect_rank(store, rank, 3, replace(CONFIG, bucket_bytes=100 + rank // 2))
    )
    assert all(isinstance(error, MismatchError) for error in errors)
    assert all("100 on rank 0 and 101 on rank 2" in str(error) for error in errors)


def test_ranks_without_shared_memory_use_tcp(monkeypatch, caplog):
    def refuse(ranks, table):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(connect, "make_memory", refuse)
    for m in connect_all_ranks(2):
        assert m.host_of == [0, 1]
        assert m.data
        m.close()
    assert "rank 1 has no shared memory" in caplog.text
    for error in connect_all_ranks(2, config=replace(CONFIG, transport="shm")):
        assert "TORCH_RING_TRANSPORT=shm, but" in str(error)


def test_a_rank_that_fails_while_connecting_fails_all(monkeypatch):
    connects = connector.Connector.connect_all

    async def fail_on_rank_1(self, listeners):
        if self._rank == 1:
            raise OSError(24, "Too many open files")
        await connects(self, listeners)

    monkeypatch.setattr(connector.Connector, "connect_all", fail_on_rank_1)
    errors = connect_all_ranks(3)
    assert all(isinstance(error, (RingError, OSError)) for error in errors)
    assert all("Too many open files" in str(error) for error in errors)


def test_a_rank_that_never_connects_is_named(monkeypatch):
    async def sleep(self, listeners):
        await asyncio.sleep(2)
        raise RingError("overslept")

    connects = connector.Connector.connect_all
    monkeypatch.setattr(
        connector.Connector,
        "connect_all",
        lambda self, listeners: (sleep if self._rank == 2 else connects)(self, listeners),
    )
    errors = connect_all_ranks(3, config=replace(CONFIG, init_timeout_s=1.0))
    assert any(
        isinstance(error, TimeoutError)
        and f"1 of its peers, rank 2 (pid {os.getpid()})" in str(error)
        for error in errors
    )


def test_a_rank_with_unexpected_connections_is_refused(monkeypatch):
    """A rank that opens connections nobody expects is not let in, and init() fails on all ranks."""
    make = handshake._HELLO.pack

    class Greedy:
        size = handshake._HELLO.size
        unpack = staticmethod(handshake._HELLO.unpack)

        @staticmethod
        def pack(magic, channel, *rest):
            return make(magic, channel + 9, *rest)

    monkeypatch.setattr(handshake, "_HELLO", Greedy)
    for error in connect_all_ranks(2, config=replace(CONFIG, init_timeout_s=1.0)):
        assert isinstance(error, RingError)


def test_connecting_inside_a_running_event_loop():
    async def inside(store, rank):
        return connect_rank(store, rank, 2)

    store = HashStore()
    for m in run_on_ranks(2, lambda rank: asyncio.run(inside(store, rank))):
        assert len(m.control) == 1
        m.close()


def test_an_unknown_interface_is_named():
    with pytest.raises(
        InvalidArgumentError, match=r"TORCH_RING_INTERFACE='nope0': must be an address .*lo"
    ):
        connect_rank(HashStore(), 0, 2, replace(CONFIG, interface="nope0"))


@pytest.mark.parametrize("interface", ["lo", "127.0.0.1"])
def test_ranks_listen_on_the_chosen_interface_only(interface):
    for m in connect_all_ranks(2, config=replace(CONFIG, transport="tcp", interface=interface)):
        assert {peer.address for peer in m.peers} == {"127.0.0.1"}
        m.close()
