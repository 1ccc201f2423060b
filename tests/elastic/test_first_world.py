# SPDX-License-Identifier: Apache-2.0
"""Processes die while an elastic job makes its first world; the others complete it."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import namespaces
import pool
import pytest
import torch
from deaths_in_init import PLACES, let_die
from logs import logged
from slow import slow

import torch_ring as hvd
from torch_ring.membership import first_world
from torch_ring.membership.directory import Directory, Gathering
from torch_ring.membership.member import key_of
from torch_ring.setup import host_socket
from torch_ring.world import current, join

SECRET = "of this test"
PATIENCE_S = 20.0

Deaths = Mapping[int, str]
"""By rank, as the launcher counts: the place where its process dies."""


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


def be_the_launcher(host: str, folder: Path, size: int) -> None:
    """Serve a directory; a thread reports the living processes to it."""
    directory = Directory(host, key_of(SECRET))
    (folder / "address.new").write_text(directory.address)
    (folder / "address.new").rename(folder / "address")
    living = {str(rank): rank for rank in range(size)}
    directory.expect(living)

    def watch() -> None:
        poll, ranks = select.poll(), {}
        for rank in range(size):
            path = folder / f"pid-{rank}"
            # Processes import torch first: for as long as a test may last, not for a while. A
            # process waits without end for a dead one whose death goes unnoticed.
            if not pool.eventually(path.exists, 3 * pool.DEADLINE_S):
                return
            try:
                fd = os.pidfd_open(int(path.read_text()))
            except ProcessLookupError:
                del living[str(rank)]
                continue
            poll.register(fd, select.POLLIN)
            ranks[fd] = rank
        while living:
            directory.expect(living)
            for fd, _ in poll.poll(1000 * PATIENCE_S):
                poll.unregister(fd)
                os.close(fd)
                del living[str(ranks.pop(fd))]

    threading.Thread(target=watch, daemon=True).start()


def note_process(folder: Path, rank: int, pid: int) -> None:
    (folder / f"pid-{rank}.new").write_text(str(pid))
    (folder / f"pid-{rank}.new").rename(folder / f"pid-{rank}")


def begin(deaths: Deaths, folder_name: str, size: int, least: int, host: str = "") -> Any:
    """Join the first world, and train a little; rank 0 is the launcher, too, if `host` is given."""
    folder, index = Path(folder_name), int(os.environ["RANK"])
    note_process(folder, index, os.getpid())
    if host and index == 0:
        be_the_launcher(host, folder, size)
    assert pool.eventually((folder / "address").exists, PATIENCE_S)
    os.environ["TORCH_RING_SECRET"] = SECRET
    os.environ["TORCH_RING_ELASTIC_DIRECTORY"] = (folder / "address").read_text()
    os.environ["TORCH_RING_PROCESS"] = str(index)
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


def require_others(results: Sequence[Any], deaths: Deaths) -> None:
    left = [rank for rank in range(len(results)) if rank not in deaths]
    wanted: list[Any] = [None] * len(results)
    for place, rank in enumerate(left):
        wanted[rank] = place, len(left), 3 * sum(left)
    assert results == wanted


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
def test_the_others_make_a_world(size: int, deaths: Deaths, transport: str, tmp_path: Path) -> None:
    be_the_launcher("127.0.0.1", tmp_path, size)
    results = pool.run(
        *(begin_without_a_deadline, size),
        args=(deaths, str(tmp_path), size, 1),
        transport=transport,
        initialized=False,
        may_die=list(deaths),
    )
    require_others(results, deaths)


def begin_with_too_few(deaths: Deaths, folder: str, size: int) -> tuple[str, str]:
    return pool.error_of(lambda: begin(deaths, folder, size, 3))


def test_too_few_are_left(tmp_path: Path) -> None:
    be_the_launcher("127.0.0.1", tmp_path, 3)
    results = pool.run(
        *(begin_with_too_few, 3),
        args=({1: "told"}, str(tmp_path), 3),
        initialized=False,
        may_die=[1],
    )
    error = (
        "RingError",
        "2 ranks are left, and TORCH_RING_MIN_RANKS is 3: the others have ended before there was a "
        "world",
    )
    assert results == [error, None, error]


def begin_without_the_last(folder: str) -> tuple[tuple[str, str], list[str]]:
    """Return the error, and the lines about the ranks that are here."""
    os.environ["TORCH_RING_INIT_TIMEOUT"] = "2"
    first_world._PROGRESS_S = 0.5
    if os.environ["RANK"] == "2":
        return ("", ""), []
    with logged() as lines:
        logging.getLogger("torch_ring").setLevel("INFO")
        error = pool.error_of(lambda: begin({}, folder, 3, 1))
    return error, [line for line in lines if " are here " in line]


def test_a_rank_that_lives_and_does_not_come_is_named(tmp_path: Path) -> None:
    """By an error, and before that in the log of the lowest rank that is here."""
    be_the_launcher("127.0.0.1", tmp_path, 3)
    note_process(tmp_path, 2, os.getpid())  # it lives on
    results = pool.run(begin_without_the_last, 3, args=(str(tmp_path),), initialized=False)
    for error, _ in results[:2]:
        assert error == (
            "TimeoutError",
            "rank 2 of 3 did not arrive within 2 s (TORCH_RING_INIT_TIMEOUT): have these processes "
            "started, and do they call init()?",
        )
    both = "2 of 3 are here (ranks 0, 1), 1 missing (rank 2)"
    assert any(both in line for line in results[0][1]), results
    assert results[1][1] == []


def begin_differently(folder: str, error: str) -> tuple[str, str]:
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
    return pool.error_of(lambda: begin({}, folder, 2, 1))


@pytest.mark.parametrize(
    ("error", "word"),
    [("MismatchError", "TORCH_RING_HEARTBEAT_TIMEOUT"), ("RingError", "no memory here")],
)
def test_a_failure_in_which_nobody_dies_is_raised(error: str, word: str, tmp_path: Path) -> None:
    be_the_launcher("127.0.0.1", tmp_path, 2)
    results = pool.run(begin_differently, 2, args=(str(tmp_path), error), initialized=False)
    assert [kind for kind, _ in results] == [error] * 2
    assert all(word in text for _, text in results)


@pytest.mark.parametrize(
    ("layout", "place"),
    [slow([0, 1, 2], "told"), ([0, 0, 1, 1], "engines")],
)
def test_one_dies_on_another_host(
    hosts: list[str], layout: list[int], place: str, tmp_path: Path
) -> None:
    size, deaths = len(layout), {len(layout) - 1: place}
    first = f"{namespaces.NETWORK}.1"
    results = pool.run(
        *(begin, size),
        args=(deaths, str(tmp_path), size, 1, first),
        transport="",
        env={"MASTER_ADDR": first, "TORCH_RING_HEARTBEAT_TIMEOUT": "5"},
        initialized=False,
        may_die=list(deaths),
        namespaces=[hosts[host] for host in layout],
    )
    require_others(results, deaths)
