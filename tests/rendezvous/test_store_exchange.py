"""How the ranks of a world meet in a store, and fail together."""

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
from torch_ring.meeting import Deadline, Meeting, name_ranks

SIZE = 3


def meeting(store, rank, size=SIZE, timeout_s=30.0):
    return Meeting(store, rank, size, Deadline(timeout_s))


def pass_through(store, rank, barrier):
    mine = meeting(store, rank)
    values = mine.gather("cards", f"of {rank}")
    mine.gather("connected", "")
    mine.finish()
    barrier.wait()  # stands for the engine's
    mine.clean_up()
    return values


def pass_all(store, times=1):
    """Make worlds one after another; return what each rank has got in the last one."""
    barrier = threading.Barrier(SIZE)

    def on_rank(rank):
        for _ in range(times):
            values = pass_through(store, rank, barrier)
        return values

    return run_on_ranks(SIZE, on_rank)


def test_all_get_the_values_of_all():
    assert pass_all(HashStore()) == [[f"of {r}" for r in range(SIZE)]] * SIZE


def test_hundreds_of_worlds_leave_nothing_behind():
    store = HashStore()
    pass_all(store)
    once = store.num_keys()
    assert pass_all(store, times=200)[0] == [f"of {r}" for r in range(SIZE)]
    assert store.num_keys() == once


def test_missing_ranks_are_named_everywhere():
    store = HashStore()
    errors = run_on_ranks(2, lambda rank: meeting(store, rank, 4, 0.5).gather("cards", ""))
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert "ranks 2, 3 of 4 did not arrive within 0.5 s" in str(error)


def test_a_failure_is_seen_by_those_who_wait_and_the_next_world_is_not_touched():
    store = HashStore()

    def fail_or_wait(rank):
        mine = meeting(store, rank)
        if rank == 1:
            mine.fail(MismatchError("no two ranks are alike"))
            return None
        return mine.gather("cards", "")

    errors = run_on_ranks(SIZE, fail_or_wait)
    for error in (errors[0], errors[2]):
        assert isinstance(error, MismatchError)
        assert str(error) == "init failed on rank 1: no two ranks are alike"
    assert pass_all(store)[0][0] == "of 0"


def test_the_first_cause_wins():
    store = HashStore()
    first, second = meeting(store, 0), meeting(store, 1)
    first.fail(KeyboardInterrupt())
    second.fail(RingError("what follows from it"))
    with pytest.raises(RingError, match="init failed on rank 0: KeyboardInterrupt"):
        second.check()
    lost = PeerLostError("rank 0 is gone")
    assert "KeyboardInterrupt" in str(second.explain(lost))


def test_two_processes_of_one_rank():
    store = HashStore()
    first = meeting(store, 1)
    with pytest.raises(RingError, match="two processes are rank 1 of 3"):
        meeting(store, 1)
    with pytest.raises(RingError, match="two processes are rank 1 of 3"):
        first.check()


def test_another_size():
    store = HashStore()
    first = meeting(store, 0, 2)
    with pytest.raises(InvalidArgumentError, match=r"rank 1 is one of 3, but another .* one of 2"):
        meeting(store, 1, 3)
    with pytest.raises(RingError, match="rank 1 is one of 3"):
        first.check()


def test_restarts_do_not_meet():
    store = HashStore()
    meeting(PrefixStore("first start", store), 0).fail(RingError("long ago"))
    meeting(PrefixStore("second start", store), 0).check()


def test_names_of_many_ranks():
    assert name_ranks([1]) == "rank 1"
    assert name_ranks([1, 2]) == "ranks 1, 2"
    assert name_ranks(range(40)).endswith("14, 15 and 24 more")
