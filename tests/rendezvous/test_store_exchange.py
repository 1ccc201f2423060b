"""The exchange of a new world over the store: the ranks gather values, and fail together."""

import threading

import pytest
from threads import run_on_ranks
from torch.distributed import HashStore, PrefixStore

from torch_ring.errors import (
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    RingError,
    TimeoutError,
)
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.store_exchange import StoreExchange, name_ranks

SIZE = 3


def exchange_on(store, rank, size=SIZE, timeout_s=30.0):
    return StoreExchange(store, rank, size, Deadline(timeout_s))


def exchange_once(store, rank, barrier):
    mine = exchange_on(store, rank)
    values = mine.gather("peer_info", f"of {rank}")
    mine.gather("connected", "")
    mine.finish()
    barrier.wait()  # stands for the engine's
    mine.clean_up()
    return values


def exchange_on_all_ranks(store, times=1):
    """Make worlds one after another; return what each rank has got in the last one."""
    barrier = threading.Barrier(SIZE)

    def on_rank(rank):
        for _ in range(times):
            values = exchange_once(store, rank, barrier)
        return values

    return run_on_ranks(SIZE, on_rank)


def test_gather_gives_all_ranks_the_values_of_all():
    assert exchange_on_all_ranks(HashStore()) == [[f"of {r}" for r in range(SIZE)]] * SIZE


def test_hundreds_of_worlds_leave_nothing_behind():
    store = HashStore()
    exchange_on_all_ranks(store)
    once = store.num_keys()
    assert exchange_on_all_ranks(store, times=200)[0] == [f"of {r}" for r in range(SIZE)]
    assert store.num_keys() == once


def test_missing_ranks_are_named_on_all_ranks():
    store = HashStore()
    errors = run_on_ranks(2, lambda rank: exchange_on(store, rank, 4, 0.5).gather("peer_info", ""))
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert "ranks 2, 3 of 4 did not arrive within 0.5 s" in str(error)
        assert str(error).endswith("have these processes started, and do they call init()?")


def test_a_failure_reaches_waiting_ranks_but_not_the_next_world():
    store = HashStore()

    def fail_or_wait(rank):
        mine = exchange_on(store, rank)
        if rank == 1:
            mine.fail(MismatchError("no two ranks are alike"))
            return None
        return mine.gather("peer_info", "")

    errors = run_on_ranks(SIZE, fail_or_wait)
    for error in (errors[0], errors[2]):
        assert isinstance(error, MismatchError)
        assert str(error) == "init failed on rank 1: no two ranks are alike"
    assert exchange_on_all_ranks(store)[0][0] == "of 0"


def test_the_first_cause_wins():
    store = HashStore()
    first, second = exchange_on(store, 0), exchange_on(store, 1)
    first.fail(KeyboardInterrupt())
    second.fail(RingError("what follows from it"))
    with pytest.raises(RingError, match="init failed on rank 0: KeyboardInterrupt"):
        second.check()
    lost = PeerLostError("rank 0 is gone")
    assert "KeyboardInterrupt" in str(second.explain(lost))


def test_two_processes_of_one_rank_are_refused():
    store = HashStore()
    first = exchange_on(store, 1)
    with pytest.raises(RingError, match="two processes are rank 1 of 3"):
        exchange_on(store, 1)
    with pytest.raises(RingError, match="two processes are rank 1 of 3"):
        first.check()


def test_different_sizes_are_refused():
    store = HashStore()
    first = exchange_on(store, 0, 2)
    with pytest.raises(InvalidArgumentError, match=r"rank 1 is one of 3, but another .* one of 2"):
        exchange_on(store, 1, 3)
    with pytest.raises(RingError, match="rank 1 is one of 3"):
        first.check()


def test_restarts_do_not_see_each_other():
    store = HashStore()
    exchange_on(PrefixStore("first start", store), 0).fail(RingError("long ago"))
    exchange_on(PrefixStore("second start", store), 0).check()


def test_many_ranks_are_named_in_short():
    assert name_ranks([1]) == "rank 1"
    assert name_ranks([1, 2]) == "ranks 1, 2"
    assert name_ranks(range(40)).endswith("14, 15 and 24 more")
