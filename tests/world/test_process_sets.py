"""Process sets: their life, and that what happens in one is no matter of another."""

import copy
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pool import error_of, run

import torch_ring as hvd
from torch_ring.process_set import engine_of, root_in

on_all_worlds = pytest.mark.parametrize(
    ("transport", "size"), [(t, s) for t in ("shm", "tcp") for s in (2, 3, 4)]
)
both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


def start_sum(process_set: hvd.ProcessSet, value: float, name: str = "sum") -> Any:
    tensor = torch.full((1000,), value)
    return engine_of(process_set).allreduce(tensor, tensor, name, hvd.Sum, 1.0, 1.0)


def total(process_set: hvd.ProcessSet) -> float:
    """Return the sum of the members' ranks, over the set."""
    result: torch.Tensor = start_sum(process_set, hvd.rank()).wait()
    assert (result == result[0]).all()
    return float(result[0])


def resources() -> tuple[int, int]:
    """Return the number of descriptors and of threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def assert_no_more_than(before: tuple[int, int] | None) -> None:
    assert before is not None
    descriptors, threads = resources()
    assert descriptors <= before[0]
    assert threads <= before[1]


def use(process_set: hvd.ProcessSet, ranks: Sequence[int]) -> None:
    """Use a set of `ranks` as a member can, or see that others cannot."""
    assert process_set.ranks == sorted(ranks)
    assert process_set.size() == len(ranks)
    assert process_set.included() == (hvd.rank() in ranks)
    if process_set.included():
        assert process_set.rank() == sorted(ranks).index(hvd.rank())
        assert root_in(process_set, max(ranks)) == len(ranks) - 1
        assert total(process_set) == sum(ranks)
        outside = next((r for r in range(hvd.size()) if r not in ranks), hvd.size())
        kind, text = error_of(lambda: root_in(process_set, outside))
        assert (kind, f"root_rank={outside} is not in" in text) == ("InvalidArgumentError", True)
        return
    for misuse in (
        lambda: engine_of(process_set),
        lambda: root_in(process_set, ranks[0]),
        process_set.rank,
    ):
        kind, text = error_of(misuse)
        assert (kind, f"rank {hvd.rank()} is not in" in text) == ("InvalidArgumentError", True)


# --- one rank


def test_what_are_no_ranks():
    for wrong in ([], [-1, 0], [1, 1], "01", 3, [0.5], None):
        with pytest.raises(hvd.InvalidArgumentError):
            hvd.ProcessSet(wrong)


def test_equality_and_pickle():
    one, other = hvd.ProcessSet([2, 0]), hvd.ProcessSet(range(0, 3, 2))
    assert one == other == pickle.loads(pickle.dumps(one))
    assert {one: "it"}[other] == "it"
    assert one != hvd.ProcessSet([0])
    assert one != [0, 2]
    everyone = hvd.global_process_set
    assert pickle.loads(pickle.dumps(everyone)) is everyone is copy.deepcopy(everyone)
    assert (one.process_set_id, one.included(), one.size()) == (None, False, 2)
    assert (everyone.process_set_id, everyone.ranks, everyone.included()) == (0, None, False)
    assert repr(one) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"


def test_without_a_world():
    for fn in (
        lambda: hvd.add_process_set([0]),
        lambda: hvd.remove_process_set(hvd.ProcessSet([0])),
        lambda: engine_of(hvd.ProcessSet([0])),
        lambda: engine_of(hvd.global_process_set),
        lambda: root_in(hvd.global_process_set, 0),
        hvd.global_process_set.size,
        hvd.global_process_set.rank,
        hvd._basics._get_process_set_ids_and_ranks,
    ):
        with pytest.raises(hvd.NotInitializedError):
            fn()


def alone() -> None:
    assert hvd._basics._get_process_set_ids_and_ranks() == {0: [0]}
    assert error_of(lambda: hvd.add_process_set([0]))[0] == "InvalidArgumentError"
    assert error_of(lambda: hvd.add_process_set([1]))[0] == "InvalidArgumentError"
    use(hvd.global_process_set, [0])


def test_a_world_of_one():
    run(alone, 1)


# --- their life


def lives() -> None:
    size = hvd.size()
    everyone = list(range(size))
    first, rest = hvd.ProcessSet([0]), hvd.ProcessSet(range(size - 1, 0, -1))
    assert hvd.add_process_set(first) is first
    assert hvd.add_process_set(rest) is rest
    ids = {0: everyone, 1: [0], 2: everyone[1:]}
    assert hvd._basics._get_process_set_ids_and_ranks() == ids
    assert str(first) == "ProcessSet(process_set_id=1, ranks=[0], mpi_comm=None)"
    for process_set in (hvd.global_process_set, first, rest, pickle.loads(pickle.dumps(rest))):
        use(process_set, process_set.ranks or [])

    for taken in ([0], everyone, rest):
        kind, text = error_of(lambda: hvd.add_process_set(taken))  # noqa: B023
        assert (kind, "there is a process set" in text) == ("InvalidArgumentError", True)
    assert error_of(lambda: hvd.add_process_set([0, size]))[0] == "InvalidArgumentError"

    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)
    assert first.process_set_id is None
    kind, text = error_of(lambda: engine_of(first))
    assert (kind, "has been removed" in text) == ("InvalidArgumentError", True)
    use(rest, everyone[1:])
    last = hvd.add_process_set([size - 1, 0] if size > 2 else [0])
    assert last.process_set_id == 1  # used again
    use(last, last.ranks or [])
    hvd.shutdown()
    assert rest.process_set_id is None
    assert hvd.global_process_set.process_set_id == 0

    hvd.init(process_sets=[rest, [0]])
    assert (rest.process_set_id, first.process_set_id) == (1, 2)
    use(rest, everyone[1:])
    use(first, [0])


@on_all_worlds
def test_life(transport, size):
    run(lives, size, transport=transport)


def come_and_go() -> None:
    before: tuple[int, int] | None = None
    for number in range(12):
        process_set = hvd.add_process_set([0, hvd.size() - 1])
        use(process_set, [0, hvd.size() - 1])
        assert hvd.remove_process_set(process_set)
        if number == 1:  # the first ones bring what stays
            before = resources()
    assert_no_more_than(before)


@both_transports
def test_nothing_is_left_of_a_removed_set(transport):
    run(come_and_go, 3, transport=transport)


def inits_often() -> None:
    hvd.shutdown()
    static = hvd.ProcessSet([0, 1])
    before: tuple[int, int] | None = None
    for number in range(200):
        hvd.init(process_sets=[static, [0]] if number % 10 == 0 else "Dynamic")
        assert total(hvd.global_process_set) == sum(range(hvd.size()))
        if static.included():
            assert total(static) == 1
        hvd.shutdown()
        if number == 10:
            before = resources()
    assert_no_more_than(before)
    hvd.init()


def test_two_hundred_inits():
    run(inits_often, 3)


# --- several at once


def in_any_order() -> None:
    size, rank = hvd.size(), hvd.rank()
    pairs = [hvd.add_process_set([r, (r + 1) % size]) for r in range(size if size > 2 else 0)]
    mine = [s for s in (hvd.global_process_set, *pairs) if s.included()]
    for turn in range(10):
        at = (rank + turn) % len(mine)
        order = [*mine[at:], *mine[:at]]
        works = [(s, start_sum(s, rank)) for s in order]
        for process_set, work in reversed(works):
            assert work.wait()[0] == sum(process_set.ranks or [])


@on_all_worlds
def test_sets_in_different_orders(transport, size):
    run(in_any_order, size, transport=transport)


# --- what goes wrong


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
    use(hvd.add_process_set([0, 2]), [0, 2])
    hvd.shutdown()
    for process_sets in ([[0, 1 + rank % 2]], [[0]] if rank else None):
        kind, text = error_of(lambda: hvd.init(process_sets=process_sets))  # noqa: B023
        assert (kind, "process_sets must be the same" in text) == ("MismatchError", True)
    for wrong in ("static", [[0], [0]], [[0, size]], [list(range(size))], [[]]):
        kind, _ = error_of(lambda: hvd.init(process_sets=wrong))  # noqa: B023
        assert kind == "InvalidArgumentError"
    hvd.init()


@both_transports
def test_disagreement(transport):
    run(disagree, 3, transport=transport)


def one_cannot(broken: int) -> None:
    from torch_ring import mesh, registry

    before = resources()

    def fails(*args: Any) -> Any:
        raise OSError("no descriptors left")

    for module, function in (
        (mesh, "_listen_unix"),
        (mesh, "run"),
        (registry, "make_engine"),
        (registry, "wait_for_all"),
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
    use(hvd.add_process_set([0, 1]), [0, 1])
    hvd.remove_process_set(hvd.ProcessSet([0, 1]))
    assert_no_more_than(before)


@both_transports
@pytest.mark.parametrize("broken", [0, 1])
def test_a_member_that_cannot_join(broken, transport):
    run(one_cannot, 3, args=(broken,), transport=transport)


def loses_a_member() -> tuple[str, str]:
    pair = hvd.add_process_set([1, 2])
    apart = hvd.add_process_set([0, 3])
    if hvd.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == 1:
        return error_of(lambda: total(pair))
    assert total(apart) == 3
    time.sleep(0.1)
    assert total(apart) == 3  # a set lives as long as its members
    return error_of(lambda: hvd.add_process_set([0]))


@both_transports
def test_a_killed_member(transport):
    outcomes = run(loses_a_member, 4, transport=transport, may_die=[2])
    for rank in (0, 1, 3):
        kind, text = outcomes[rank]
        assert (kind, "rank 2 (" in text) == ("PeerLostError", True), outcomes[rank]


def dies_while_joining() -> tuple[str, str]:
    from torch_ring import mesh

    if hvd.rank() == 2:
        mesh.run = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: hvd.add_process_set([1, 2]))


@both_transports
def test_a_member_that_dies_while_it_joins(transport):
    for kind, text in run(dies_while_joining, 3, transport=transport, may_die=[2])[:2]:
        assert (kind, "rank 2 (" in text) == ("PeerLostError", True), text


def interrupted() -> None:
    from torch_ring import mesh

    run_of_mesh = mesh.run

    def is_interrupted(work: Any) -> None:
        work.close()
        raise KeyboardInterrupt

    if hvd.rank() == 1:
        mesh.run = is_interrupted
        with pytest.raises(KeyboardInterrupt):
            hvd.add_process_set([0, 1])
        mesh.run = run_of_mesh
    else:
        kind, text = error_of(lambda: hvd.add_process_set([0, 1]))
        assert (kind, "KeyboardInterrupt" in text) == ("RingError", True), text
    use(hvd.add_process_set([0, 1]), [0, 1])


@both_transports
def test_an_interrupted_member(transport):
    run(interrupted, 3, transport=transport)


def is_shut_down_by_another_thread() -> str:
    if hvd.rank() == 0:  # waits for the others, who never come
        threading.Timer(0.1, hvd.shutdown).start()
        return error_of(lambda: hvd.add_process_set([0]))[0]
    return error_of(hvd.barrier)[0]


def test_shutdown_ends_what_is_being_added():
    ended = run(is_shut_down_by_another_thread, 2)
    assert ended[0] in ("RingError", "NotInitializedError", "PeerLostError")
    assert ended[1] in ("MismatchError", "PeerLostError")


def forks() -> None:
    pair = hvd.add_process_set([0, 1])
    expected = known_of(pair)
    child = os.fork()
    if child == 0:
        try:
            asks_but_cannot_use(pair, expected)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    use(pair, [0, 1])


def known_of(pair: hvd.ProcessSet) -> list[object]:
    ranks = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.is_homogeneous()
    member = pair.included() and pair.rank()
    sets = hvd._basics._get_process_set_ids_and_ranks()
    return [*ranks, pair.process_set_id, pair.ranks, member, hvd.global_process_set.ranks, sets]


def asks_but_cannot_use(pair: hvd.ProcessSet, expected: list[object]) -> None:
    """A worker of a DataLoader shards its data by what its parent is, also within a set."""
    hvd.init()  # there is a world
    assert known_of(pair) == expected
    for operation in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_object(1, root_rank=0),
        lambda: hvd.add_process_set([1, 2]),
        lambda: hvd.remove_process_set(pair),
        hvd.join,
        hvd.barrier,
    ):
        with pytest.raises(hvd.NotInitializedError, match=f"forked from rank {expected[0]}"):
            operation()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert pair.process_set_id is None
    with pytest.raises(hvd.NotInitializedError, match="call init"):
        hvd.rank()


@both_transports
def test_a_forked_child_can_ask_and_no_more(transport):
    run(forks, 3, transport=transport)


# --- worlds of some of the ranks


def in_halves(turns: int) -> None:
    rank = int(os.environ["RANK"])
    for _ in range(turns):
        half = [rank % 2 + 2, rank % 2]
        hvd.init(comm=half)
        assert (hvd.rank(), hvd.size()) == (rank // 2, 2)
        assert (hvd.local_size(), hvd.cross_size()) == (2, 1)
        assert hvd.allgather(torch.tensor([rank])).tolist() == sorted(half)
        use(hvd.add_process_set([1]), [1])
        hvd.shutdown()
    kind, text = error_of(lambda: hvd.init(comm=[(rank + 1) % 4]))
    assert (kind, f"rank {rank} is not in" in text) == ("InvalidArgumentError", True)
    hvd.init(comm=[rank])
    assert (hvd.rank(), hvd.size()) == (0, 1)
    hvd.shutdown()
    hvd.init(comm=[3, 1, 2, 0])
    assert (hvd.rank(), hvd.size()) == (rank, 4)
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("meeting", ["agent", "rank 0", "host"])
def test_lists_of_ranks(meeting):
    env = {}
    if meeting != "agent":
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = str(unused.getsockname()[1])
        env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
    if meeting == "host":
        env["MASTER_ADDR"] = ""
    run(in_halves, 4, args=(3,), env=env, initialized=False)
