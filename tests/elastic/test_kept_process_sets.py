# SPDX-License-Identifier: Apache-2.0
"""Process sets while ranks die: lost sets, added sets, optimizers on sets.

Whole sets are made again in all trainings of test_kills.py, and newcomers get those of the others.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pool
import pytest
import torch
from process_set_use import check_process_set
from slow import slow

import torch_ring as hvd
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


@pytest.mark.parametrize(
    "told",
    [
        [((("a", "b"), True),), ()],  # a rank died while one was added
        [(), ((("a", "b"), True),)],
        [((("a",), False),), ((("a",), False),)],  # no program has an object of it
        [None, None],
    ],
)
def test_sets_that_not_all_survivors_know_are_not_kept(told: list[Any]) -> None:
    assert sets_to_keep(told, {"a": 0, "b": 1}) == []


# --- on ranks that die

Death = tuple[int, int]
"""The rank of the first world that dies, and the step in which it does."""


def run_steps(
    deaths: Sequence[Death],
    step: Callable[[Any], None] = lambda _: None,
    on_reset: Callable[[], None] = lambda: None,
) -> None:
    """Call `step` STEPS times while ranks die; each begins with a barrier of all ranks."""
    name = hvd.rank()
    state = hvd.elastic.ObjectState(step=0)
    state.register_reset_callbacks([on_reset])

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            if (name, state.step) in deaths:
                die()
            hvd.barrier()
            step(state)
            state.commit()

    go_on(state)


def lose_a_rank() -> set[tuple[str, str]]:
    """Rank 1 dies; return the errors of a set that it was in."""
    lost, whole = hvd.add_process_set([1, 2]), hvd.add_process_set([2, 3])
    of_lost, of_whole = copy.deepcopy((lost, whole))
    index = {lost: 0, whole: 1}
    run_steps([(1, 2)])
    for each in (whole, of_whole):
        assert each.process_set_id == whole.process_set_id
        check_process_set(each, [1, 2])
    assert [index[lost], index[whole]] == [0, 1]
    errors = set()
    for each in (lost, of_lost):
        assert each.process_set_id is None
        assert each != hvd.ProcessSet([1, 2])
        assert "[1, 2]" in repr(each)
        errors |= {pool.error_of(use) for use in uses_of(each)}
    return errors


def uses_of(process_set: hvd.ProcessSet) -> list[Callable[[], object]]:
    return [
        process_set.included,
        process_set.rank,
        process_set.size,
        lambda: hvd.allreduce(torch.ones(3), process_set=process_set),
        lambda: hvd.allgather_object(1, process_set=process_set),
        lambda: hvd.remove_process_set(process_set),
        pickle.loads(pickle.dumps(process_set)).included,
    ]


def test_a_lost_set_says_which_rank_it_has_lost() -> None:
    texts = pool.run(lose_a_rank, 4, may_die=[1])
    wanted = (
        "the process set [1, 2] has lost rank 1 of the 4 ranks that there were; its other ranks "
        "have the numbers [1] now. Make another one: call add_process_set() on all ranks, in a "
        "reset callback or in the elastic function"
    )
    error = {("ProcessSetLostError", wanted)}
    assert texts == [None if rank == 1 else error for rank in range(4)]


def add_again() -> tuple[list[int], list[int], dict[int, list[int]]]:
    """Rank 0 dies; programs then add their sets again, as Horovod requires."""
    first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])
    hvd.add_process_set(first)
    hvd.add_process_set(second)

    def add() -> None:
        assert hvd.add_process_set(first) is first  # it has the ranks of these numbers now
        assert hvd.add_process_set(second) is second
        kind, _ = pool.error_of(lambda: hvd.add_process_set([1, 2]))  # those of the second
        assert kind == "InvalidArgumentError"

    run_steps([(0, 2)], on_reset=add)
    for each in (first, second):
        check_process_set(each, each.ranks or [])
    return first.ranks or [], second.ranks or [], hvd._basics._get_process_set_ids_and_ranks()


def test_sets_may_be_added_again() -> None:
    wanted = ([0, 1], [1, 2], {0: [0, 1, 2], 1: [1, 2], 2: [0, 1]})
    assert pool.run(add_again, 4, may_die=[0]) == [None, *[wanted] * 3]


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


# --- optimizers on sets


def model_of_zero() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def optimizer_of(model: torch.nn.Linear, process_set: hvd.ProcessSet, rate: float = 1.0) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=rate)
    return hvd.DistributedOptimizer(sgd, process_set=process_set)


def train_in_a_set(
    ranks: Sequence[int], deaths: Sequence[Death], early: bool
) -> tuple[float, float]:
    """Train on a process set, and on all ranks; return the weights of both.

    Args:
        early: whether victims die before the step's first pass, which then fails at its end: with
            buckets sent, and objects kept by the error's traceback.
    """
    name = hvd.rank()
    models = [model_of_zero(), model_of_zero()]
    in_set = optimizer_of(models[0], hvd.add_process_set(ranks))
    of_all = optimizer_of(models[1], hvd.global_process_set)
    state = hvd.elastic.TorchState(
        models[0], in_set, other=models[1], other_optimizer=of_all, step=0
    )

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            for model, optimizer in zip(models, (in_set, of_all), strict=True):
                optimizer.zero_grad()
                loss = model(torch.full((1, 1), (state.step + 1.0) * (name + 1))).sum()
                if (name, state.step) in deaths and (early or optimizer is of_all):
                    die()
                if early and state.step in (step for _, step in deaths):
                    time.sleep(0.1)  # the others learn of it before that pass
                loss.backward()
            of_all.step()
            in_set.step()

    train(state)
    return models[0].weight.item(), models[1].weight.item()


def expected_weights(
    members: Sequence[int], size: int, deaths: Sequence[Death]
) -> tuple[float, float]:
    """Return the weights of the members; the death of a rank ends its part with that step."""
    weight = other = 0.0
    for step in range(STEPS):
        living = [rank for rank in range(size) if dict(deaths).get(rank, STEPS) > step]
        weight -= (step + 1.0) * sum(rank + 1 for rank in members) / len(members)
        other -= (step + 1.0) * sum(rank + 1 for rank in living) / len(living)
    return weight, other


@pytest.mark.parametrize(
    ("transport", "size", "ranks", "deaths", "early"),
    [
        ("shm", 4, [1, 3], [(2, 2), (0, 5)], False),  # the set then has all ranks
        ("shm", 4, [0, 2, 3], [(1, 0)], True),
        slow("tcp", 4, [0, 2, 3], [(1, 0)], True),
    ],
)
def test_an_optimizer_on_a_set_goes_on(
    transport: str, size: int, ranks: list[int], deaths: list[Death], early: bool
) -> None:
    args, victims = (ranks, deaths, early), [rank for rank, _ in deaths]
    found = pool.run(train_in_a_set, size, args=args, transport=transport, may_die=victims)
    for rank in ranks:
        assert found[rank] == pytest.approx(expected_weights(ranks, size, deaths))


def step_in_a_lost_set(replaces: bool) -> tuple[str, float]:
    """Rank 1 dies before step 3; a callback may replace the optimizer."""
    name, model = hvd.rank(), model_of_zero()
    state = hvd.elastic.TorchState(model, optimizer_of(model, hvd.add_process_set([0, 1])), step=0)

    def replace() -> None:
        state.optimizer = optimizer_of(model, hvd.add_process_set([0, hvd.size() - 1]), 2.0)

    if replaces:
        state.register_reset_callbacks([replace])

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            hvd.barrier()
            state.optimizer.zero_grad()
            model(torch.full((1, 1), name + 1.0)).sum().backward()
            hvd.barrier()
            if (name, state.step) == (1, 3):
                die()
            hvd.barrier()
            state.optimizer.step()

    return pool.error_of(lambda: train(state))[0], model.weight.item()


@pytest.mark.parametrize(
    ("replaces", "ending", "weight"),
    [
        (False, "ProcessSetLostError", -4.5),  # of the three steps before
        # Then five of the former ranks 0 and 3, at twice the rate.
        (True, "nothing", -4.5 - 2 * 5 * 2.5),
    ],
)
def test_an_optimizer_on_a_lost_set_is_replaced_or_does_not_step(
    replaces: bool, ending: str, weight: float
) -> None:
    outcomes = pool.run(step_in_a_lost_set, 4, args=(replaces,), may_die=[1])
    assert [outcomes[rank][0] for rank in (0, 2, 3)] == [ending] * 3
    assert outcomes[0][1] == weight
