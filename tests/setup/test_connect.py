# SPDX-License-Identifier: Apache-2.0
"""connect(): O(log n) connections a rank, and failures that reach all ranks.

Ranks are threads, and hosts are made up: their ranks are on one machine, but need not know it.
"""

import contextlib
import gc
import os
import threading
import time
from dataclasses import replace

import pytest
from exchanges import path_on_host
from pool import eventually
from slow import slow
from threads import run_on_ranks
from torch.distributed import HashStore, PrefixStore

from torch_ring.config import Config
from torch_ring.errors import RingError, TimeoutError
from torch_ring.setup import connect as connecting
from torch_ring.setup.connect import connect, listen
from torch_ring.setup.exchange import exchange_hosts, failing_together
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline
from torch_ring.setup.socket_name import listen_as_rank, socket_name_by_store
from torch_ring.setup.store import given_store
from torch_ring.world.engine import make_engine, wait_for_all

CONFIG = Config(init_timeout_s=30.0)
this = threading.local()  # .rank: of the thread


def open_descriptors():
    """Return this process's open descriptors, whose numbers are reused, and their names."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return found


@pytest.fixture(autouse=True)
def _closed_descriptors():
    """Every descriptor that a test opens is closed; the pool's store closes earlier connections."""
    before = open_descriptors()
    yield
    gc.collect()  # errors of threads, and the objects in their tracebacks
    assert eventually(lambda: open_descriptors() <= before), open_descriptors() - before


def connect_rank(store, rank, size, config=CONFIG, host=""):
    """Connect one rank, as init() does."""
    this.rank = rank
    identity = Identity(rank, size)
    place = given_store(store, identity)
    name = socket_name_by_store(PrefixStore(host, store))
    path = path_on_host(identity, config.init_timeout_s, place, name)
    with (
        failing_together(path),
        listen_as_rank(None, identity, path.deadline, path.watch, is_new=True) as unix,
        listen(identity, config, "127.0.0.1", unix) as listeners,
    ):
        own = listeners.info.to_value()
        table = exchange_hosts(own, config.common(), path)
        connections = connect(config, table, listeners, path)
        # Stands for the engines' barrier: until then, ranks tell one another of failures.
        store.add("through", 1)
        end = time.monotonic() + 10
        while store.add("through", 0) < size and time.monotonic() < end:
            time.sleep(0.01)
        return connections


def connect_all(size, config_of=lambda _: CONFIG, hosts=None):
    store, hosts = HashStore(), hosts or [0] * size
    return run_on_ranks(
        size,
        lambda rank: connect_rank(store, rank, size, config_of(rank), f"host {hosts[rank]}"),
    )


def close_all(everyone):
    run_on_ranks(len(everyone), lambda rank: everyone[rank].close())


def use_all(everyone, config=CONFIG):
    """Make the engines of the world, and use them."""

    def use(rank):
        size = len(everyone)
        engine = make_engine(everyone[rank], 0, range(size), [0] * size, config)
        try:
            wait_for_all(engine, Deadline(20.0), size)
        finally:
            engine.shutdown()

    assert run_on_ranks(len(everyone), use) == [None] * len(everyone)


@pytest.fixture
def put_on_hosts(monkeypatch):
    """Return a function that makes the ranks believe that they are on several hosts."""
    make = connecting._own_info

    def put(hosts):
        # They share one address; real hosts with one address would not find one another.
        monkeypatch.setattr(connecting, "_require_addresses", lambda _peers: None)
        monkeypatch.setattr(
            connecting,
            "_own_info",
            lambda identity, *rest: replace(
                make(identity, *rest), machine=f"host {hosts[identity.rank]}"
            ),
        )

    return put


# --- resources


def neighbours(size):
    """Return the number of ranks to which each rank is connected."""
    distances = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    return len({step % size for d in distances for step in (d, -d)})


@pytest.mark.parametrize(("size", "count", "width"), [(2, 1, 1), (4, 3, 3), slow(16, 2, 1)])
def test_descriptors_of_a_rank(put_on_hosts, size, count, width):
    """Data connections are made when they are needed."""
    config = replace(CONFIG, connections=width)
    hosts = [rank * count // size for rank in range(size)]
    put_on_hosts(hosts)
    before = open_descriptors()
    everyone = connect_all(size, lambda _: config, hosts)
    opened = len(open_descriptors() - before)
    shares = len(set(hosts)) < size
    listeners = 1 + (len(set(hosts)) > 1)
    # An event, the memory, the listeners, and the connections of the plane.
    assert opened == size * (1 + shares + listeners + neighbours(size))
    for connections in everyone:
        assert connections.host_of == hosts
        assert (connections.memory is not None) == shares
        assert connections.plane.missing() == []
    use_all(everyone, config)
    close_all(everyone)


def test_ranks_use_tcp_if_one_of_them_has_no_shared_memory(monkeypatch, caplog):
    make = connecting.make_memory

    def refuse_on_rank_1(*arguments):
        if this.rank == 1:
            raise OSError(38, "Function not implemented")
        return make(*arguments)

    monkeypatch.setattr(connecting, "make_memory", refuse_on_rank_1)
    everyone = connect_all(3)
    assert all(c.host_of == [0, 1, 2] and c.memory is None for c in everyone)
    use_all(everyone)
    close_all(everyone)
    assert "rank 1 has no shared memory, so all ranks use TCP: [Errno 38]" in caplog.text
    errors = connect_all(3, lambda _: replace(CONFIG, transport="shm"))
    assert all("TORCH_RING_TRANSPORT=shm, but there is no shared" in str(e) for e in errors), errors


def test_ranks_listen_on_the_chosen_interfaces_only():
    config = replace(CONFIG, transport="tcp", interface="lo,127.0.0.2")
    everyone = connect_all(2, lambda _: config)
    for connections in everyone:
        assert [peer.addresses for peer in connections.peers] == [["127.0.0.1", "127.0.0.2"]] * 2
    use_all(everyone, config)
    close_all(everyone)


@pytest.mark.parametrize(
    ("interfaces", "text"),
    [
        (["127.0.0.1,127.0.0.2", "127.0.0.1"], "host 127.0.0.1 has 2, and rank 1's host .* has 1"),
        (["127.0.0.1,127.0.0.2", "127.0.0.1,::1"], "from 127.0.0.2 of rank 0's host to ::1 of"),
    ],
    ids=["numbers", "kinds"],
)
def test_interfaces_that_do_not_pair_are_told_to_all_ranks(interfaces, text):
    config = replace(CONFIG, transport="tcp")
    errors = connect_all(2, lambda rank: replace(config, interface=interfaces[rank]))
    for error in errors:
        with pytest.raises(RingError, match=text) as raised:
            raise error
        assert "set TORCH_RING_INTERFACE" in str(raised.value)


# --- failures


def test_a_different_secret_is_refused_on_all_ranks():
    errors = connect_all(3, lambda rank: replace(CONFIG, secret="odd" if rank == 2 else "even"))
    for error in errors:
        assert isinstance(error, RingError)
        assert "TORCH_RING_SECRET" in str(error), errors


def replace_plane(monkeypatch, rank, instead):
    """Call `instead` in place of making the plane of a rank."""
    make = connecting.ControlPlane

    def plane(own, *rest):
        if own != rank:
            return make(own, *rest)
        *_, launcher, _, _ = rest
        try:
            instead()
        finally:
            if launcher >= 0:
                os.close(launcher)

    monkeypatch.setattr(connecting, "ControlPlane", plane)


def test_a_rank_that_fails_while_connecting_fails_all(monkeypatch):
    def fail():
        raise OSError(24, "Too many open files")

    replace_plane(monkeypatch, 1, fail)
    errors = connect_all(3)
    for rank, error in enumerate(errors):
        prefix = "" if rank == 1 else "init failed on "
        assert isinstance(error, RingError)
        assert str(error).startswith(f"{prefix}rank 1: [Errno 24] Too many open files"), errors


def test_a_rank_that_never_connects_is_named(monkeypatch):
    late, done, waiting = 0, threading.Event(), [0, 1, 2]

    def oversleep():
        done.wait(20)
        raise RingError("overslept")

    replace_plane(monkeypatch, late, oversleep)
    store = HashStore()

    def on_rank(rank):
        try:
            return connect_rank(store, rank, 3, replace(CONFIG, init_timeout_s=1.5))
        finally:
            waiting.remove(rank)
            if waiting == [late]:
                done.set()

    errors = run_on_ranks(3, on_rank)
    text = f"1 of its peers, rank {late} (pid {os.getpid()})"
    assert any(isinstance(error, TimeoutError) and text in str(error) for error in errors), errors
    assert all(isinstance(error, RingError) for error in errors)
