"""Process sets while ranks die and join: whole sets are made again, others raise an error."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pool
import pytest
import torch
from arrivals import run_with_arrivals
from process_set_use import check_process_set
from slow import on_shm_and_slowly_on_tcp

import torch_ring as hvd
from torch_ring.world import current
from torch_ring.world.engine import EngineExchange
from torch_ring.world.process_set import sets_to_keep

STEPS = 8


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- which sets are made again


def test_sets_whose_processes_live_are_kept_in_their_order() -> None:
    told = [((("a", "c"), True), (("a",), True), (("b", "c"), False)), None]
    told.append(((("a", "c"), False), (("a",), False), (("b", "c"), True)))
    assert sets_to_keep(told, {"a": 0, "b": 1, "c": 2}) == [("a", "c"), ("a",), ("b", "c")]
    assert sets_to_keep(told, {"a": 0, "c": 1}) == [("a", "c"), ("a",)]


def test_sets_that_not_all_survivors_know_are_not_kept() -> None:
    """A rank died while one was added."""
    living = {"a": 0, "b": 1}
    assert sets_to_keep([((("a", "b"), True),), ()], living) == []
    assert sets_to_keep([(), ((("a", "b"), True),)], living) == []


def test_sets_that_no_program_has_an_object_of_are_not_kept() -> None:
    assert sets_to_keep([((("a",), False),), ((("a",), False),)], {"a": 0, "b": 1}) == []
    assert sets_to_keep([None, None], {"a": 0}) == []


# --- on ranks that die

Death = tuple[int, int]
"""The rank of the first world that dies, and the step in which it does."""


def run_steps(deaths: Sequence[Death], step: Callable[[Any], None]) -> None:
    """Call `step` STEPS times while ranks die; each begins with a barrier of all ranks."""
    name = hvd.rank()
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            if (name, state.step) in deaths:
                die()
            hvd.barrier()
            step(state)
            state.commit()

    go_on(state)


def use_sets(sets: Sequence[Sequence[int]], deaths: Sequence[Death]) -> int:
    """Use process sets in all steps; return the number of sets that have lost a rank at the end."""
    names = list(range(hvd.size()))  # of the first world, by rank
    mine = hvd.rank()
    objects = [hvd.add_process_set(ranks) for ranks in sets]
    copies = copy.deepcopy(objects)
    found = {each: index for index, each in enumerate(objects)}
    seen: dict[int, list[int]] = {}  # ranks of a set in the last world that had all of them

    def step(_: Any) -> None:
        living = hvd.allgather(torch.tensor([mine])).tolist()
        assert living == sorted(living)
        assert set(names) - set(dict(deaths)) <= set(living)
        assert hvd.global_process_set.ranks == list(range(len(living)))
        check_process_set(hvd.global_process_set, list(range(len(living))))
        for index, (before, each, other) in enumerate(zip(sets, objects, copies, strict=True)):
            if set(before) <= set(living):
                seen[index] = ranks = sorted(living.index(name) for name in before)
                assert each.ranks == other.ranks == ranks
                assert each.process_set_id == other.process_set_id
                assert each.included() is (mine in before)
                assert each.size() == len(before)
                check_process_set(each, ranks)
                check_process_set(other, ranks)
            else:
                check_lost(each, seen[index])
                check_lost(other, seen[index])
        assert [found[each] for each in objects] == list(range(len(objects)))

    run_steps(deaths, step)
    return sum(each.process_set_id is None for each in objects)


def check_lost(process_set: hvd.ProcessSet, before: list[int]) -> None:
    tensor = torch.ones(3)
    uses: list[Callable[[], object]] = [
        process_set.included,
        process_set.rank,
        process_set.size,
        lambda: hvd.allreduce(tensor, process_set=process_set),
        lambda: hvd.broadcast(tensor, 0, process_set=process_set),
        lambda: hvd.allgather_object(1, process_set=process_set),
        lambda: hvd.barrier(process_set),
        lambda: hvd.remove_process_set(process_set),
        pickle.loads(pickle.dumps(process_set)).included,
    ]
    for use in uses:
        kind, text = pool.error_of(use)
        assert kind == "ProcessSetLostError", (kind, text)
        assert f"the process set {before} has lost rank" in text
        assert "add_process_set()" in text
    assert process_set.process_set_id is None
    assert process_set != hvd.ProcessSet(before)
    assert str(before) in repr(process_set)


CASES = [
    (3, [[1, 2], [0, 2]], [(0, 2)]),  # rank 0, which is in one of them
    (4, [[1, 3], [2], [0, 1, 2]], [(3, 2)]),  # the last one; [0, 1, 2] are all remaining ranks
    (4, [[0, 3], [1, 2], [3, 2]], [(1, 1), (0, 4)]),  # two after another
    (4, [[0, 1], [2, 3]], [(1, 3), (0, 3)]),  # a whole set at once
    (3, [[2], [0], [1, 2]], [(0, 2), (1, 5)]),  # down to one
]


@on_shm_and_slowly_on_tcp
@pytest.mark.parametrize(("size", "sets", "deaths"), CASES)
def test_sets_are_made_again(
    size: int, sets: list[list[int]], deaths: list[Death], transport: str
) -> None:
    victims = [rank for rank, _ in deaths]
    left = pool.run(use_sets, size, args=(sets, deaths), transport=transport, may_die=victims)
    lost = sum(bool(set(ranks) & set(victims)) for ranks in sets)
    assert left == [None if rank in victims else lost for rank in range(size)]


def lose_a_rank(victim: int) -> str:
    pair = hvd.add_process_set([1, 2])
    texts: list[str] = []

    def step(_: Any) -> None:
        if hvd.size() < 4:
            texts.append(pool.error_of(pair.included)[1])

    run_steps([(victim, 2)], step)
    return texts[-1]


@pytest.mark.parametrize(("victim", "left"), [(1, 1), (2, 1)])
def test_a_lost_set_says_which_rank_it_has_lost(victim: int, left: int) -> None:
    texts = pool.run(lose_a_rank, 4, args=(victim,), may_die=[victim])
    wanted = (
        f"the process set [1, 2] has lost rank {victim} of the 4 ranks that there were; its other "
        f"ranks have the numbers [{left}] now. Make another one: call add_process_set() on all "
        "ranks, in a reset callback or in the elastic function"
    )
    assert texts == [None if rank == victim else wanted for rank in range(4)]


def add_again(how: str) -> tuple[list[int], list[int], dict[int, list[int]]]:
    """Rank 0 dies; programs then add their sets again, as Horovod requires."""
    first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])
    hvd.add_process_set(first)
    hvd.add_process_set(second)
    name, state = hvd.rank(), hvd.elastic.ObjectState(step=0)

    def add() -> None:
        if how == "objects":  # the lost one has the ranks of these numbers now
            assert hvd.add_process_set(first) is first
            assert hvd.add_process_set(second) is second
        else:
            hvd.add_process_set([1, 2])  # the ranks that remain of [2, 3]
            kind, _ = pool.error_of(lambda: hvd.add_process_set([1, 2]))
            assert kind == "InvalidArgumentError"
            assert first.process_set_id is None
            hvd.add_process_set([0, 1])
            hvd.remove_process_set(hvd.ProcessSet([0, 1]))
            hvd.add_process_set(first)

    state.register_reset_callbacks([add])

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            if (name, state.step) == (0, 2):
                die()
            hvd.barrier()
            state.commit()

    go_on(state)
    for each in (first, second):
        check_process_set(each, each.ranks or [])
    sets = hvd._basics._get_process_set_ids_and_ranks()
    return first.ranks or [], second.ranks or [], sets


@pytest.mark.parametrize("how", ["objects", "ranks"])
def test_sets_may_be_added_again(how: str) -> None:
    wanted = ([0, 1], [1, 2], {0: [0, 1, 2], 1: [1, 2], 2: [0, 1]})
    assert pool.run(add_again, 4, args=(how,), may_die=[0]) == [None, *[wanted] * 3]


def forget_sets() -> dict[int, list[int]]:
    kept = hvd.ProcessSet([2])
    for ranks in ([1, 2], [0, 2], kept):
        hvd.add_process_set(ranks)
    run_steps([(0, 1)], lambda _: None)
    assert kept.ranks == [1]
    return hvd._basics._get_process_set_ids_and_ranks()


def test_sets_that_nobody_has_an_object_of_end_with_the_world() -> None:
    """A program that adds new sets after each death does not accumulate them."""
    wanted = {0: [0, 1], 1: [1]}
    assert pool.run(forget_sets, 3, may_die=[0])[1:] == [wanted] * 2


def outside_of_elastic() -> None:
    """Worlds made by the program itself do not know the ranks of earlier worlds."""
    pair = hvd.add_process_set([0, 1])
    hvd.shutdown()
    hvd.init()
    assert (pair.process_set_id, pair.ranks, pair.included()) == (None, [0, 1], False)
    kind, text = pool.error_of(lambda: hvd.barrier(pair))
    assert (kind, "has not been added" in text) == ("InvalidArgumentError", True)
    hvd.add_process_set(pair)
    check_process_set(pair, [0, 1])


def test_init_makes_no_set_again() -> None:
    pool.run(outside_of_elastic, 3)


def use_a_second_hierarchy() -> tuple[list[int] | None, list[int] | None]:
    """The objects of the first call are gone."""
    for _ in range(2):
        host, one_of_each_host = hvd.hierarchy()

    def step(_: Any) -> None:
        check_process_set(host, host.ranks or [])
        check_process_set(one_of_each_host, one_of_each_host.ranks or [])

    run_steps([(0, 2)], step)
    return host.ranks, one_of_each_host.ranks


def test_a_hierarchy_that_was_asked_for_twice_is_made_again() -> None:
    levels = pool.run(use_a_second_hierarchy, 3, transport="tcp", may_die=[0])
    assert levels == [None, ([0], [0, 1]), ([1], [0, 1])]


# --- in the recovery, and with newcomers


def die_in_the_recovery(victim: int, moment: str) -> tuple[list[int], list[int]]:
    """Rank 3 dies, and then another one while the sets are made again."""
    name, numbers = hvd.rank(), EngineExchange.numbers
    sets = [hvd.add_process_set(ranks) for ranks in ([1, 2], [0, 1, 2], [2], [0, 3])]
    visits = [0]

    def count(self: EngineExchange, *values: int) -> list[list[int]]:
        visits[0] += 1
        if (visits[0], moment) == (2, "before"):
            die()
        result = numbers(self, *values)
        if (visits[0], moment) == (2, "after"):
            die()
        return result

    def step(state: Any) -> None:
        if state.step == 1 and hvd.size() == 4:
            if name == 3:
                die()
            if name == victim:
                EngineExchange.numbers = count  # type: ignore[method-assign]
        kept = [each for each in sets if each.process_set_id is not None]
        for each in kept:
            check_process_set(each, each.ranks or [])

    run_steps([], step)
    whole = [each.ranks or [] for each in sets if each.process_set_id is not None]
    kinds = [pool.error_of(each.size)[0] for each in sets if each.process_set_id is None]
    assert kinds == ["ProcessSetLostError"] * (len(sets) - len(whole))
    return whole, [record.id for record in current.world().process_sets.records]


@on_shm_and_slowly_on_tcp
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("victim", "whole"), [(0, [[0, 1], [1]]), (1, [[1]]), (2, [])])
def test_a_rank_dies_while_sets_are_made_again(
    victim: int, whole: list[list[int]], moment: str, transport: str
) -> None:
    results = pool.run(
        die_in_the_recovery, 4, args=(victim, moment), transport=transport, may_die=[victim, 3]
    )
    wanted = (whole, list(range(len(whole) + 1)))
    assert results == [None if rank in (victim, 3) else wanted for rank in range(4)]


def let_one_in(folder: str) -> tuple[Any, ...]:
    """Rank 0 of three dies, then a process comes."""
    death, index = Path(folder) / "death", int(os.environ["TORCH_RING_PROCESS"][1:])
    hvd.shutdown()
    pairs = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
    hvd.init(process_sets=pairs)  # the newcomer makes none
    seen = []
    if index == 3:
        assert pool.eventually(death.exists, 20.0)
        pairs = []
    state = hvd.elastic.ObjectState(step=0, end=-1)

    def add() -> None:
        if hvd.size() == 3:
            seen.append(hvd.add_process_set([0, hvd.size() - 1]))

    state.register_reset_callbacks([add])

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        while state.step != state.end:
            if (index, state.step) == (0, 2):
                die()
            hvd.barrier()
            if hvd.size() == 2:
                death.touch()
                check_process_set(pairs[1], [0, 1])
            if seen:
                check_process_set(hvd.ProcessSet([0, 1]), [0, 1])
                check_process_set(seen[0], [0, 2])
                state.end = state.step + 3 if state.end < 0 else state.end
            state.step += 1
            state.commit()

    go_on(state)
    kinds = [pool.error_of(each.included)[0] for each in pairs]
    return hvd.rank(), kinds, hvd._basics._get_process_set_ids_and_ranks()


@on_shm_and_slowly_on_tcp
def test_newcomers_know_the_sets_of_the_others(transport: str, tmp_path: Path) -> None:
    results = run_with_arrivals(
        let_one_in, 3, 1, args=(str(tmp_path),), transport=transport, may_die=[0]
    )
    sets = {0: [0, 1, 2], 1: [0, 1], 2: [0, 2]}
    lost = ["ProcessSetLostError", "nothing"]
    assert results == [None, (0, lost, sets), (1, lost, sets), (2, [], sets)]
