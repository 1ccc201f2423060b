# SPDX-License-Identifier: Apache-2.0
"""Processes die while an elastic job makes its first world; the others complete it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pool
import pytest
import torch
from arrivals import run_below_launcher
from logs import logged
from on_ranks import on_ranks

import torch_ring as hvd
from torch_ring.membership import first_world
from torch_ring.membership.directory import Gathering
from torch_ring.setup import connect, host_socket
from torch_ring.world import current, join

Deaths = Mapping[int, str]
"""By rank, as the launcher counts: the place where its process dies."""


# --- places in init() where a process dies

PLACES: dict[str, tuple[Any, str, str]] = {
    "before": (current, "init", "before"),
    "asking": (first_world, "_ask", "before"),
    "placed": (first_world, "_ask", "after"),
    "arriving": (join, "meet_on_host", "before"),
    "arrived": (join, "exchange_hosts", "before"),
    "told": (join, "exchange_hosts", "after"),
    "memory": (connect, "_share_memory", "after"),
    "connecting": (connect, "_wait_for_neighbours", "before"),
    "connected": (connect, "_wait_for_neighbours", "after"),
    "engine": (join, "_world_of", "after"),
    "engines": (join, "wait_for_all", "after"),
}
"""Owner and name of a function, and whether before a call or after one that succeeds."""


def let_die(place: str) -> None:
    """Kill this process at a place in the next init()."""
    owner, name, when = PLACES[place]
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> None:
        if when == "after":
            function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    mock.patch.object(owner, name, call).start()


# --- the order of places


def ask(gathering: Gathering, process: str, question: str = "first") -> Any:
    return gathering.ask(process, question, f"host of {process}", 7)


def waits(here: list[int], missing: list[int]) -> dict[str, Any]:
    return {"kind": "wait", "here": here, "missing": missing}


def test_those_that_have_died_are_not_waited_for() -> None:
    gathering = Gathering()
    gathering.expect({"a": 0, "b": 1, "c": 2})
    assert ask(gathering, "c") == waits([2], [0, 1])
    assert ask(gathering, "a") == waits([0, 2], [1])
    gathering.expect({"b": 1, "c": 2})  # one that has asked already
    assert ask(gathering, "c") == waits([2], [1])
    gathering.expect({"c": 2})
    assert ask(gathering, "c") == {
        "kind": "place",
        "processes": ["c"],
        "store": ["host of c", 7],
    }


def test_whoever_asks_again_waits_for_all_that_live() -> None:
    gathering = Gathering()
    gathering.expect({"a": 0, "b": 1, "c": 2})
    for process in "abc":
        ask(gathering, process)
    assert ask(gathering, "a", "second") == waits([0], [1, 2])
    assert ask(gathering, "c", "second") == waits([0, 2], [1])
    assert ask(gathering, "b")["processes"] == ["a", "b", "c"]  # is late
    gathering.expect({"a": 0, "c": 2})
    assert ask(gathering, "a", "second")["processes"] == ["a", "c"]
    assert ask(gathering, "c", "second")["processes"] == ["a", "c"]


def test_a_world_is_void_when_one_of_its_processes_has_ended() -> None:
    gathering = Gathering()
    gathering.expect({"a": 0, "b": 1, "c": 2})
    for process in "abc":
        ask(gathering, process)
    gathering.expect({"a": 0, "c": 2, "d": 3})  # another one has come in its place
    assert ask(gathering, "a") == ask(gathering, "c") == {"kind": "void", "gone": [1]}


# --- on ranks that die


def begin(deaths: Deaths, least: int) -> Any:
    """Join the first world, and train a little."""
    index = int(os.environ["RANK"])
    os.environ["TORCH_RING_PROCESS"] = f"p{index}"
    del os.environ["TORCHELASTIC_RUN_ID"]  # no other launcher has started it
    os.environ["TORCH_RING_MIN_RANKS"] = str(least)
    if index in deaths:
        let_die(deaths[index])
    current.init()
    state = hvd.elastic.ObjectState(step=0, sum=0)

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        while state.step < 3:
            state.sum += int(hvd.allreduce(torch.tensor(index), op=hvd.Sum))
            state.step += 1
            state.check_host_updates()

    go_on(state)
    place = hvd.rank(), hvd.size(), state.sum
    hvd.shutdown()
    return place


def begin_without_a_deadline(*args: Any) -> Any:
    """Join the first world; a wait for a missing rank until the deadline ends the test.

    The leader does not go on without it after a moment, or tell it of the failure.
    """
    os.environ["TORCH_RING_INIT_TIMEOUT"] = "3600"
    first_world._JOIN_S = host_socket._GRACE_S = host_socket.TELL_S = 1800.0
    return begin(*args)


def cases() -> list[Any]:
    """Return deaths at all places."""
    found: list[Any] = [
        (4, {0: "before", 2: "told"}, "shm"),
        (4, {1: "asking", 2: "connecting"}, "tcp"),
        (4, {3: "arriving", 1: "memory"}, "shm"),
        (4, {0: "connected", 2: "engines"}, "tcp"),
        (4, {1: "arrived", 0: "engine"}, "shm"),
        (3, {0: "connecting"}, "shm"),  # others wait for neighbours
        (3, {0: "told", 1: "before"}, "tcp"),  # one is left
        (3, {1: "placed"}, "shm"),
        (3, {2: "arrived"}, "shm"),
    ]
    assert {*PLACES} == {place for _, deaths, _ in found for place in deaths.values()}
    return found


@pytest.mark.parametrize(("size", "deaths", "transport"), cases())
def test_the_others_make_a_world(size: int, deaths: Deaths, transport: str) -> None:
    results = run_below_launcher(
        *(begin_without_a_deadline, size),
        args=(deaths, 1),
        transport=transport,
        may_die=list(deaths),
    )
    left = [rank for rank in range(size) if rank not in deaths]
    wanted = {rank: (place, len(left), 3 * sum(left)) for place, rank in enumerate(left)}
    assert results == [wanted.get(rank) for rank in range(size)]


def begin_with_too_few(deaths: Deaths) -> tuple[str, str]:
    return pool.error_of(lambda: begin(deaths, 3))


def test_too_few_are_left() -> None:
    results = run_below_launcher(begin_with_too_few, 3, args=({1: "told"},), may_die=[1])
    error = (
        "RingError",
        "2 ranks are left, and TORCH_RING_MIN_RANKS is 3: the others have ended before there was a "
        "world",
    )
    assert results == [error, None, error]


def begin_without_the_last(over: Path) -> tuple[tuple[str, str], list[str]]:
    """Return the error, and the lines about the ranks that are here; the last one lives on."""
    os.environ["TORCH_RING_INIT_TIMEOUT"] = "2"
    first_world._PROGRESS_S = 0.5
    error = ("", "")
    with logged() as lines:
        logging.getLogger("torch_ring").setLevel("INFO")
        if os.environ["RANK"] != "2":
            error = pool.error_of(lambda: begin({}, 1))
    pool.all_have_passed(over, 3)
    return error, [line for line in lines if " are here " in line]


def test_a_rank_that_lives_and_does_not_come_is_named(tmp_path: Path) -> None:
    """By an error, and before that in the log of the lowest rank that is here."""
    results = run_below_launcher(begin_without_the_last, 3, args=(tmp_path / "over",))
    for error, _ in results[:2]:
        assert error == (
            "TimeoutError",
            "rank 2 of 3 did not arrive within 2 s (TORCH_RING_INIT_TIMEOUT): have these processes "
            "started, and do they call init()?",
        )
    both = "2 of 3 are here (ranks 0, 1), 1 missing (rank 2)"
    assert any(both in line for line in results[0][1]), results
    assert results[1][1] == []


def begin_differently(error: str) -> tuple[str, str]:
    attempts = 0

    def fail(*_: Any) -> None:
        nonlocal attempts
        attempts += 1
        assert attempts <= 2, "tried again, although nobody has died"
        raise hvd.RingError("no memory here")

    if error == "RingError":
        join.exchange_hosts = fail
    elif os.environ["RANK"] == "1":
        os.environ["TORCH_RING_HEARTBEAT_TIMEOUT"] = "7"
    return pool.error_of(lambda: begin({}, 1))


@pytest.mark.parametrize(
    ("error", "word"),
    [("MismatchError", "TORCH_RING_HEARTBEAT_TIMEOUT"), ("RingError", "no memory here")],
)
def test_a_failure_in_which_nobody_dies_is_raised(error: str, word: str) -> None:
    results = run_below_launcher(begin_differently, 2, args=(error,))
    assert [kind for kind, _ in results] == [error] * 2
    assert all(word in text for _, text in results)


INHERITED = {"TORCH_RING_ELASTIC_NEWCOMER": "1", "TORCH_RING_PROCESS": "2.1"}


@on_ranks(2, env=INHERITED, initialized=False)
def test_a_newcomers_own_job_has_no_newcomers() -> None:
    """Such as an evaluation, which it starts with torchrun. test_identity.py has more launchers."""
    hvd.init()
    assert hvd.size() == 2
    hvd.shutdown()
    del os.environ["TORCHELASTIC_RUN_ID"]
    hvd.init(process_sets=[[0, 1]])  # as itself: alone at first, without the sets of the others
    assert hvd.size() == 1
    hvd.shutdown()
