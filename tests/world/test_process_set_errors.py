"""Process sets that cannot be made, and members that are lost."""

import os
import signal
import threading
import time
from typing import Any

import pytest
from pool import error_of, run
from process_set_use import assert_no_more_than, check_process_set, resources, sum_of_ranks
from worlds import on_both_transports

import torch_ring as hvd


def disagree() -> None:
    rank, size = hvd.rank(), hvd.size()
    kept = hvd.add_process_set([0])
    for fn in (
        lambda: hvd.add_process_set([rank % 2, 2]),
        lambda: hvd.remove_process_set(kept) if rank else hvd.add_process_set([1]),
        lambda: hvd.remove_process_set(kept if rank else hvd.ProcessSet([1])),
    ):
        kind, text = error_of(fn)
        assert kind == "MismatchError", text
        assert "rank 0: " in text
        assert "; rank 1: " in text
    assert hvd._basics._get_process_set_ids_and_ranks() == {0: list(range(size)), 1: [0]}
    check_process_set(hvd.add_process_set([0, 2]), [0, 2])
    hvd.shutdown()
    for process_sets in ([[0, 1 + rank % 2]], [[0]] if rank else None):
        kind, text = error_of(lambda: hvd.init(process_sets=process_sets))  # noqa: B023
        assert (kind, "process_sets must be the same" in text) == ("MismatchError", True)
    for wrong in ("static", [[0], [0]], [[0, size]], [list(range(size))], [[]]):
        kind, _ = error_of(lambda: hvd.init(process_sets=wrong))  # noqa: B023
        assert kind == "InvalidArgumentError"
    hvd.init()


@on_both_transports
def test_different_process_sets_are_refused(transport):
    run(disagree, 3, transport=transport)


def fail_on_one_rank(broken: int) -> None:
    from torch_ring.connections import connect
    from torch_ring.world import process_set_table

    before = resources()

    def fails(*args: Any) -> Any:
        raise OSError("no descriptors left")

    for module, function in (
        (connect, "_listen_unix"),
        (connect, "run"),
        (process_set_table, "make_engine"),
        (process_set_table, "wait_for_all"),
    ):
        kept = getattr(module, function)
        if hvd.rank() == broken:
            setattr(module, function, fails)
        kind, text = error_of(lambda: hvd.add_process_set([0, 1]))
        setattr(module, function, kept)
        if hvd.rank() == broken:
            assert (kind, text) == ("OSError", "no descriptors left")
        else:
            assert (kind, f"rank {broken} could not join" in text) == ("RingError", True), (
                function,
                kind,
                text,
            )
            assert "no descriptors left" in text
    assert hvd.ProcessSet([0, 1]).process_set_id is None
    check_process_set(hvd.add_process_set([0, 1]), [0, 1])
    hvd.remove_process_set(hvd.ProcessSet([0, 1]))
    assert_no_more_than(before)


@on_both_transports
@pytest.mark.parametrize("broken", [0, 1])
def test_a_member_that_cannot_join(broken, transport):
    run(fail_on_one_rank, 3, args=(broken,), transport=transport)


def lose_a_member() -> tuple[str, str]:
    pair = hvd.add_process_set([1, 2])
    apart = hvd.add_process_set([0, 3])
    if hvd.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == 1:
        return error_of(lambda: sum_of_ranks(pair))
    assert sum_of_ranks(apart) == 3
    time.sleep(0.1)
    assert sum_of_ranks(apart) == 3  # a set lives as long as its members
    return error_of(lambda: hvd.add_process_set([0]))


@on_both_transports
def test_a_killed_member(transport):
    outcomes = run(lose_a_member, 4, transport=transport, may_die=[2])
    for rank in (0, 1, 3):
        kind, text = outcomes[rank]
        assert (kind, "rank 2 (" in text) == ("PeerLostError", True), outcomes[rank]


def die_while_joining() -> tuple[str, str]:
    from torch_ring.connections import connect

    if hvd.rank() == 2:
        connect.run = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: hvd.add_process_set([1, 2]))


@on_both_transports
def test_a_member_that_dies_while_it_joins(transport):
    for kind, text in run(die_while_joining, 3, transport=transport, may_die=[2])[:2]:
        assert (kind, "rank 2 (" in text) == ("PeerLostError", True), text


def interrupt_a_member() -> None:
    from torch_ring.connections import connect

    run_of_connect = connect.run

    def is_interrupted(work: Any) -> None:
        work.close()
        raise KeyboardInterrupt

    if hvd.rank() == 1:
        connect.run = is_interrupted
        with pytest.raises(KeyboardInterrupt):
            hvd.add_process_set([0, 1])
        connect.run = run_of_connect
    else:
        kind, text = error_of(lambda: hvd.add_process_set([0, 1]))
        assert (kind, "KeyboardInterrupt" in text) == ("RingError", True), text
    check_process_set(hvd.add_process_set([0, 1]), [0, 1])


@on_both_transports
def test_an_interrupted_member(transport):
    run(interrupt_a_member, 3, transport=transport)


def shut_down_in_another_thread() -> str:
    if hvd.rank() == 0:  # waits for the other rank, which never comes
        threading.Timer(0.1, hvd.shutdown).start()
        return error_of(lambda: hvd.add_process_set([0]))[0]
    return error_of(hvd.barrier)[0]


def test_shutdown_ends_the_wait_for_a_process_set():
    ended = run(shut_down_in_another_thread, 2)
    assert ended[0] in ("RingError", "NotInitializedError", "PeerLostError")
    assert ended[1] in ("MismatchError", "PeerLostError")
