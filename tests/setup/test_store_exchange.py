# SPDX-License-Identifier: Apache-2.0
"""The exchange between hosts: failures reach all hosts, and worlds do not mix."""

import threading
import time

import pytest
from made_up import exchange_on, group, ranks_in
from threads import DEADLINE_S, run_on_ranks
from torch.distributed import FileStore, HashStore

from torch_ring.errors import MismatchError, RingError, TimeoutError
from torch_ring.setup import store_exchange
from torch_ring.setup.failure import Failure
from torch_ring.setup.store_exchange import linger

SIZE = 3


def exchange_once(store, rank, size=SIZE, timeout_s=20.0):
    """Take part as a host of one rank; return the exchange and the ranks of all hosts."""
    return gather_ranks(exchange_on(store, range(rank, rank + 1), size, timeout_s), rank, size)


def gather_ranks(side, rank, size=SIZE):
    """Gather as a host of one rank that has its place; return the exchange and all ranks."""
    try:
        values = side.gather(group(range(rank, rank + 1), size, rank).to_value())
    except RingError as error:
        side.fail(Failure.of_all(error))
        raise
    return side, sorted(rank for value in values for rank in ranks_in(size)(value))


def exchange_on_all_ranks(store, times=1):
    barrier = threading.Barrier(SIZE)

    def on_rank(rank):
        for _ in range(times):
            side, ranks = exchange_once(store, rank)
            barrier.wait(20)  # stands for the engines'
            side.close()
        return ranks

    return run_on_ranks(SIZE, on_rank)


def test_a_store_in_a_file_will_do(tmp_path):
    view = FileStore(str(tmp_path / "store"), -1)
    assert exchange_on_all_ranks(view, times=3) == [[0, 1, 2]] * SIZE
    with pytest.raises(TimeoutError, match=r"ranks 0, 2 of 3 did not arrive"):
        exchange_once(view, 1, timeout_s=0.2)


def test_values_in_several_chunks(monkeypatch):
    monkeypatch.setattr(store_exchange, "CHUNK_BYTES", 260)  # less than three values
    assert exchange_on_all_ranks(HashStore()) == [[0, 1, 2]] * SIZE


def test_hundreds_of_worlds_leave_nothing_behind():
    store = HashStore()
    exchange_on_all_ranks(store, times=2)
    once = store.num_keys()
    assert exchange_on_all_ranks(store, times=200)[0] == [0, 1, 2]
    assert store.num_keys() == once


def test_missing_ranks_are_named_on_all_hosts():
    store = HashStore()
    errors = run_on_ranks(2, lambda rank: exchange_once(store, rank, 4, 1.0))
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert "ranks 2, 3 of 4 did not arrive within 1 s" in str(error)
        assert str(error).endswith("have these processes started, and do they call init()?")


def test_a_failure_reaches_those_who_wait_and_those_who_come_late():
    store = HashStore()
    failing = exchange_on(store, range(1, 2), SIZE)
    late = threading.Event()

    def on_rank(rank):
        if rank == 1:
            time.sleep(0.1)
            failing.fail(Failure.of(MismatchError("no two ranks are alike"), 1))
            late.set()
            return None
        if rank == 2:
            assert late.wait(DEADLINE_S / 2)
        return exchange_once(store, rank, timeout_s=2 * DEADLINE_S)  # longer than the test lasts

    errors = run_on_ranks(SIZE, on_rank)
    for error in (errors[0], errors[2]):
        assert isinstance(error, MismatchError)
        assert str(error) == "init failed on rank 1: no two ranks are alike"
    # All three know of it: they begin anew.
    assert exchange_on_all_ranks(store) == [[0, 1, 2]] * SIZE


def test_a_rank_that_knows_of_a_failure_is_not_told_again():
    store, is_back = HashStore(), threading.Event()
    exchange_on(store, range(1, 2), SIZE).fail(Failure("RingError", "once"))

    def on_rank(rank):
        if rank == 1:
            is_back.set()
        else:
            assert is_back.wait(DEADLINE_S)
            time.sleep(0.1)  # rank 1 comes first
            with pytest.raises(RingError, match="once"):
                exchange_once(store, rank)
        return exchange_once(store, rank)[1]

    assert run_on_ranks(SIZE, on_rank) == [[0, 1, 2]] * SIZE


def test_a_failure_after_the_values_reaches_its_world_only():
    store = HashStore()
    sides = [side for side, _ in run_on_ranks(SIZE, lambda rank: exchange_once(store, rank))]
    sides[2].fail(Failure.of(RingError("no more descriptors"), 2))
    for side in sides[:2]:
        with pytest.raises(RingError, match="init failed on rank 2: no more descriptors"):
            side.poll(at_once=True)
    assert exchange_on_all_ranks(store, times=2) == [[0, 1, 2]] * SIZE


def test_a_failure_of_the_next_world_is_not_this_ones():
    store = HashStore()
    sides = [side for side, _ in run_on_ranks(SIZE, lambda rank: exchange_once(store, rank))]
    exchange_on(store, range(1), SIZE).fail(Failure("RingError", "in the next world"))
    sides[1].poll(at_once=True)


def test_the_first_cause_wins():
    store = HashStore()
    first, second = (exchange_on(store, range(rank, rank + 1), SIZE) for rank in (0, 1))
    first.fail(Failure.of(KeyboardInterrupt(), 0))
    assert second.fail(Failure("RingError", "what follows")).text.endswith("KeyboardInterrupt")


def test_two_processes_of_one_rank_are_refused_on_all():
    """A surplus rank waits in the next world, and gets the error there."""
    store, ranks = HashStore(), [0, 1, 1, 2]
    timeout_s = 2 * DEADLINE_S  # longer than the test lasts
    # Each one takes its place before the next one comes.
    sides = [exchange_on(store, range(rank, rank + 1), SIZE, timeout_s) for rank in ranks]
    errors = run_on_ranks(4, lambda index: gather_ranks(sides[index], ranks[index]))
    assert all(isinstance(error, RingError) for error in errors), errors


def test_a_group_of_more_ranks_than_are_missing_is_refused():
    store = HashStore()
    first = exchange_on(store, range(2), SIZE)
    with pytest.raises(RingError, match="two processes have the same rank"):
        exchange_on(store, range(1, 3), SIZE)
    with pytest.raises(RingError, match="two processes have the same rank"):
        first.poll(at_once=True)


def die_after_sending(side, value):
    def die():
        raise KeyboardInterrupt

    side._watch = die
    side.gather(value)


@pytest.mark.parametrize("value_was_there", [False, True])
def test_a_rank_that_was_killed_and_started_again(value_was_there):
    """It gets an error, or a new world with the others; it never hangs."""
    store = HashStore()
    killed = exchange_on(store, range(1, 2), 2)
    if value_was_there:
        with pytest.raises(KeyboardInterrupt):
            die_after_sending(killed, group(range(1, 2), 2, 1).to_value())

    def on_rank(rank):
        for _ in range(4):
            try:
                side, ranks = exchange_once(store, rank, 2, timeout_s=3.0)
                if value_was_there and side.world == 0 and side._generation == 0:
                    side.fail(Failure("PeerLostError", "rank 1 has exited"))
                    continue
                return ranks
            except RingError:
                pass
        return "never"

    assert run_on_ranks(2, on_rank) == [[0, 1]] * 2


def test_values_are_gathered_in_rounds():
    store = HashStore()
    barrier = threading.Barrier(SIZE)

    def on_rank(rank):
        side, _ = exchange_once(store, rank)
        found = [side.gather([rank, number]) for number in range(3)]
        barrier.wait(20)
        side.close()
        return [sorted(values) for values in found]

    for _ in range(2):
        expected = [[[rank, number] for rank in range(SIZE)] for number in range(3)]
        assert run_on_ranks(SIZE, on_rank) == [expected] * SIZE


def test_the_server_waits_until_all_know_of_a_failure(monkeypatch):
    monkeypatch.setattr(store_exchange, "_LINGER_S", 60.0)
    store = HashStore()
    failing, other = (exchange_on(store, range(rank, rank + 1), SIZE) for rank in range(2))
    failing.fail(Failure("RingError", "so it is"))
    server = threading.Thread(target=linger, args=(store,))
    server.start()
    server.join(0.2)
    assert server.is_alive()
    with pytest.raises(RingError, match="so it is"):
        other.gather("")
    server.join(30)
    assert not server.is_alive()
