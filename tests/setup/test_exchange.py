# SPDX-License-Identifier: Apache-2.0
"""The exchange of all ranks of a world, in two levels: ranks are threads, hosts are made up."""

import logging
import os
import threading
import time

import pytest
from exchanges import (
    exchange_on,
    meet,
    new_name,
    pass_on,
    path_on_host,
    place_of,
    ranks_met,
)
from pool import eventually
from threads import run_on_ranks
from torch.distributed import HashStore

from torch_ring.errors import MismatchError, PeerLostError, RingError
from torch_ring.setup import exchange, host_socket
from torch_ring.setup.exchange import failing_together
from torch_ring.setup.launchers import Identity
from torch_ring.setup.peer_info import parse_table


def test_several_hosts():
    names, store = [new_name() for _ in range(3)], HashStore()

    def on_rank(rank):
        host = rank // 2
        more = {"name": names[host], "store": store, "host": host, "local_size": 2}
        return ranks_met(rank, 6, **more)

    for _ in range(3):  # successive worlds at one name
        assert run_on_ranks(6, on_rank) == [list(range(6))] * 6


def test_ranks_without_a_name_are_groups_of_their_own():
    store, barrier = HashStore(), threading.Barrier(3)

    def on_rank(rank):
        with meet(rank, 3, name=None, store=store, local_size=1) as (path, peers, leads):
            if leads:
                pass_on(path, b"of the host's leader", [0])
            else:
                frame = path.host.receive()
                assert frame.payload == b"of the host's leader"
                assert os.fstat(frame.fds[0]).st_ino == os.fstat(0).st_ino
                os.close(frame.fds[0])
            barrier.wait(20)
            return leads, [peer.rank for peer in peers]

    results = run_on_ranks(3, on_rank)
    assert sorted(leads for leads, _ in results) == [False, False, True]
    assert all(ranks == [0, 1, 2] for _, ranks in results)


def test_one_host_has_a_key_that_was_never_in_the_store(monkeypatch):
    """This holds even if a rank came so late that it had to use the store."""
    monkeypatch.setattr(host_socket, "_GRACE_S", 0.3)
    is_closed, take_place = threading.Event(), exchange.StoreExchange

    def take_place_and_tell(*arguments):
        place = take_place(*arguments)
        is_closed.set()  # the leader accepts no more
        return place

    monkeypatch.setattr(exchange, "StoreExchange", take_place_and_tell)
    name, store, barrier = new_name(), RecordingStore(), threading.Barrier(2)

    def on_rank(rank):
        if rank == 1:
            assert is_closed.wait(20)
        identity = Identity(rank, 2)
        with failing_together(path_on_host(identity, 20.0, place_of(store), name)) as path:
            table, _ = exchange_on(path)
            barrier.wait(20)
        return parse_table(table, 2)

    results = run_on_ranks(2, on_rank)
    assert all(table.is_private for table in results)
    (secret,) = {table.secret for table in results}
    assert store.values
    for value in store.values:
        assert secret not in value


class RecordingStore(HashStore):
    """A store that keeps every value it has ever had."""

    def __init__(self):
        super().__init__()
        self.values = []

    def set(self, key, value):
        self.values.append(value)
        super().set(key, value)


@pytest.mark.parametrize("hosts", [1, 3])
def test_different_settings_are_named_on_all_ranks(hosts):
    names, store = [new_name() for _ in range(3)], HashStore()

    def on_rank(rank):
        host = rank * hosts // 3
        settings = {"TORCH_RING_BUCKET_BYTES": 100 + rank // 2, "B": 1}
        more = {"name": names[host], "host": host, "settings": settings, "local_size": 3 // hosts}
        return ranks_met(rank, 3, store=store, **more)

    for error in run_on_ranks(3, on_rank):
        assert isinstance(error, MismatchError)
        assert str(error) == (
            "TORCH_RING_BUCKET_BYTES must be the same on all ranks: it is 100 on rank 0 and 101 on "
            "rank 2"
        )


def test_two_processes_of_one_rank_are_refused(monkeypatch):
    monkeypatch.setattr(host_socket, "TELL_S", 0.3)
    name = new_name()

    def on_process(index):
        time.sleep(0.1 * index)
        return ranks_met((0, 1, 1)[index], 3, name=name, timeout_s=5.0)

    errors = run_on_ranks(3, on_process)
    assert all("two processes are rank 1 of 3" in str(e) for e in errors), errors


def test_different_sizes_are_refused(monkeypatch):
    monkeypatch.setattr(host_socket, "TELL_S", 0.3)
    name = new_name()
    errors = run_on_ranks(2, lambda rank: ranks_met(rank, 2 + rank, name=name, timeout_s=5.0))
    assert all(isinstance(error, MismatchError) for error in errors), errors
    assert all("give all ranks the same size" in str(error) for error in errors)
    store = HashStore()
    errors = run_on_ranks(
        2, lambda rank: ranks_met(rank, 2 + rank, name=None, store=store, timeout_s=5.0)
    )
    assert all("give all ranks the same size" in str(error) for error in errors), errors


TOO_MANY = OSError(24, "Too many open files")


@pytest.mark.parametrize(
    ("hosts", "culprit", "failure"),
    [(2, 0, TOO_MANY), (2, 1, TOO_MANY), (1, 2, KeyboardInterrupt())],
)
def test_a_failure_before_the_values_reaches_all_and_the_next_world_is_sound(
    hosts, culprit, failure
):
    names, store = [new_name() for _ in range(2)], HashStore()

    def on_rank(rank):
        host = rank * hosts // 4
        more = {"name": names[host], "store": store, "host": host, "local_size": 4 // hosts}
        identity, place = Identity(rank, 4, local_size=4 // hosts), place_of(store)
        time.sleep(0.1 * rank)
        try:
            with failing_together(path_on_host(identity, 20.0, place, names[host])) as path:
                if rank == culprit:
                    raise failure
                exchange_on(path, host, {"A": 1})
        except (RingError, KeyboardInterrupt) as error:
            return str(error), ranks_met(rank, 4, **more)
        return None

    began = time.monotonic()
    results = run_on_ranks(4, on_rank)
    assert time.monotonic() - began < 15
    for rank, (text, ranks) in enumerate(results):
        assert ranks == [0, 1, 2, 3]
        prefix = "" if rank == culprit else "init failed on "
        if failure is TOO_MANY:
            assert text.startswith(f"{prefix}rank {culprit}: {failure}: raise `ulimit -n`")
        elif rank != culprit:
            assert text == f"init failed on rank {culprit}: KeyboardInterrupt"


def test_a_rank_that_dies_is_noticed():
    name = new_name()
    first = path_on_host(Identity(0, 3), 5.0, None, name)

    def on_rank(rank):
        if rank == 0:
            with failing_together(first):
                exchange_on(first)
        if rank == 1:
            gone = path_on_host(Identity(1, 3), 5.0, None, name)
            gone.host.connection.close()
            return None
        time.sleep(0.1)
        return ranks_met(rank, 3, name=name, timeout_s=5.0)

    errors = run_on_ranks(3, on_rank)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLostError), errors
        assert "rank 1 has exited during init" in str(error)


def test_a_failure_is_told_to_no_rank_that_has_exited(monkeypatch):
    """Rank 1 has ended the exchange, and rank 2 has exited before it came."""
    monkeypatch.setattr(host_socket, "TELL_S", 30.0)  # which it does not wait
    name, asked = new_name(), []

    def exited(here):
        asked.append({*here})
        return {2} if asked[-1] == {0, 1} else ()

    first = path_on_host(Identity(0, 3), 5.0, None, name, exited)

    def on_rank(rank):
        if rank == 1:
            path_on_host(Identity(1, 3), 5.0, None, name).host.connection.close()
        else:
            with failing_together(first):
                exchange_on(first)

    assert "rank 1 has exited during init" in str(run_on_ranks(2, on_rank)[0])
    assert asked.count({0, 1}) == 1


def test_progress_is_logged_on_rank_0(monkeypatch, caplog):
    monkeypatch.setattr(exchange, "_PROGRESS_S", 0.1)
    monkeypatch.setattr(host_socket, "TELL_S", 0.3)
    caplog.set_level(logging.INFO, "torch_ring")
    name = new_name()

    def is_told():
        begin, end = "2 of 20 are here (ranks 0, 1), 18 missing (ranks 2, 3,", "16, 17 and 2 more)"
        lines = [record.getMessage() for record in caplog.records]
        return any(begin in line and line.endswith(end) for line in lines)

    def on_rank(rank):
        if rank < 2:
            return ranks_met(rank, 20, name=name)
        found = eventually(is_told)
        with failing_together(path_on_host(Identity(2, 20), 20.0, None, name)):
            raise RingError("that is all" if found else caplog.text)

    for error in run_on_ranks(3, on_rank):
        assert "that is all" in str(error)
