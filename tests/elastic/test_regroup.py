# SPDX-License-Identifier: Apache-2.0
"""Regrouping: the leader, lost and surviving processes; and its messages."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pool
import pytest
from on_ranks import on_ranks

import torch_ring as hvd
from torch_ring.elastic import regroup as regroup_module
from torch_ring.elastic.regroup import LeftOutError, Limits, NextWorld, come, regroup
from torch_ring.membership import member as member_module
from torch_ring.membership.directory import Directory, ask_directory, tell_directory
from torch_ring.membership.listener import Listener
from torch_ring.membership.member import (
    Channel,
    ForeignMessageError,
    Member,
    MessageKey,
    Reach,
    dial,
    member_id,
    reach,
)

KEY = MessageKey(b"k" * 32)
HELLO = b"t-ring"  # of a caller without TLS
LIMITS = Limits(timeout_s=30.0, silence_s=5.0)


class Process:
    """A process of a job, as threads of this one have it."""

    def __init__(self, name: str, host: str = "127.0.0.1") -> None:
        self.roster: list[Member] = []
        self.listener = Listener(host, KEY, self.knows)
        self.member = Member(name, host, self.listener.port)

    def knows(self, process: Member) -> bool:
        return process in self.roster

    def serve(self) -> tuple[str, int]:
        return self.member.id, 1

    def regroup(self, limits: Limits = LIMITS, suspects: Sequence[str] = ()) -> NextWorld:
        return regroup(
            *(self.roster, 1, self.member, self.listener, limits),
            *(self.serve, set(suspects) - {self.member.host}),
        )


@contextlib.contextmanager
def job(size: int, hosts: Sequence[str] = ("127.0.0.1",)) -> Iterator[list[Process]]:
    """Make processes, equally many on each host."""
    places = [hosts[index * len(hosts) // size] for index in range(size)]
    processes = [Process(f"p{index}", host) for index, host in enumerate(places)]
    for process in processes:
        process.roster = [each.member for each in processes]
    try:
        yield processes
    finally:
        for process in processes:
            process.listener.close()


def outcomes(
    processes: list[Process], limits: Limits = LIMITS, suspects: Sequence[str] = ()
) -> list[NextWorld | Exception]:
    def call(process: Process) -> NextWorld | Exception:
        try:
            return process.regroup(limits, suspects)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(call, processes))


@pytest.mark.parametrize("dead", [[], [1], [0, 3], [0, 1, 2]])
def test_the_lowest_survivor_leads(dead: list[int]) -> None:
    with job(4) as processes:
        for index in dead:
            processes[index].listener.close()
        living = [process for process in processes if processes.index(process) not in dead]
        for group in outcomes(living):
            assert isinstance(group, NextWorld), group
            assert [member.id for member in group.members] == [p.member.id for p in living]
            served = (living[0].member.id, 1) if len(living) > 1 else ("", 0)
            assert group.store == served


@pytest.mark.parametrize("kind", [hvd.TimeoutError, hvd.MismatchError])
def test_a_leader_that_cannot_serve_says_so_to_all(kind: type[hvd.RingError]) -> None:
    def fail() -> tuple[str, int]:
        raise kind("the store of the next world: no socket")

    with job(3) as processes, mock.patch.object(processes[0], "serve", fail):
        first, *others = outcomes(processes)
    assert type(first) is kind
    for error in others:
        assert type(error) is (hvd.RingError if kind is hvd.MismatchError else kind)
        assert "the store of the next world: no socket" in str(error)


def test_a_member_that_dies_while_it_waits_is_left_out() -> None:
    with job(3) as processes:
        channel = dial(processes[0].member, KEY, 5.0)
        channel.send({"kind": "join", "member": processes[1].member.packed()})
        assert pool.eventually(lambda: processes[0].listener.requests.qsize() == 1, 20)
        channel.close()
        processes[1].listener.close()
        first, third = outcomes([processes[0], processes[2]])
        assert isinstance(first, NextWorld)
        assert [member.id for member in first.members] == ["p0", "p2"]
        assert first == third


def test_too_few_survivors_are_an_error_on_all() -> None:
    with job(4) as processes:
        for process in processes[2:]:
            process.listener.close()
        for error in outcomes(processes[:2], Limits(30.0, 5.0, 3)):
            assert isinstance(error, hvd.RingError)
            assert "2 ranks are left, and TORCH_RING_MIN_RANKS is 3: ranks 2, 3 " in str(error)


def test_a_busy_rank_is_named_when_the_time_is_over() -> None:
    with job(3) as processes:
        first, second = outcomes(processes[:2], Limits(1.0, 5.0, 1))
        assert isinstance(first, hvd.TimeoutError)
        assert "2 did not come within 1 s" in str(first)  # rank 1 may have given up already
        assert isinstance(second, hvd.TimeoutError)


def test_a_rank_that_is_always_sent_elsewhere_gives_up() -> None:
    with job(2) as (first, second), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(second.regroup, Limits(0.5, 5.0))
        while not waiting.done():
            with contextlib.suppress(queue.Empty, OSError):
                first.listener.requests.get(timeout=0.05).answer({"kind": "elsewhere"})
        with pytest.raises(hvd.TimeoutError, match="rank 1 has found no leader"):
            waiting.result()


@contextlib.contextmanager
def silent(process: Process) -> Iterator[None]:
    """Simulate a stopped process: the kernel accepts its connections, but it does not answer."""
    process.listener.close()
    with socket.create_server(("127.0.0.1", process.member.port)):
        yield


@pytest.mark.parametrize(
    ("size", "stopped", "goes_on"),
    [
        (3, [0], True),
        (4, [2, 3], True),
        (4, [0, 1], False),
    ],
)
def test_only_a_majority_goes_on_where_others_may_live(
    size: int, stopped: list[int], goes_on: bool
) -> None:
    def hurried(call: Any) -> Any:
        """Give stopped processes little time to answer, and the others the full time."""

        def ask(member: Member, key: MessageKey, answer_s: float, **more: Any) -> Any:
            is_stopped = member in [processes[index].member for index in stopped]
            return call(member, key, 0.5 if is_stopped else answer_s, **more)

        return ask

    with job(size) as processes, contextlib.ExitStack() as stack:
        for index in stopped:
            stack.enter_context(silent(processes[index]))
        for call in (dial, reach):
            patch = mock.patch.object(regroup_module, call.__name__, hurried(call))
            stack.enter_context(patch)
        living = [process for process in processes if processes.index(process) not in stopped]
        for outcome in outcomes(living, Limits(30.0, 20.0, 1)):
            assert isinstance(outcome, NextWorld if goes_on else LeftOutError), outcome


HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.mark.parametrize(
    ("size", "hosts", "is_cut", "wanted"),
    [
        pytest.param(4, HOSTS, True, ["p0", "p1"], id="a majority does not wait for it"),
        pytest.param(2, HOSTS[::-1], True, None, id="a minority asks it again, and gives up"),
        pytest.param(2, HOSTS[::-1], False, ["p1"], id="a slow one has no rank any more"),
    ],
)
def test_a_host_that_is_silent_already(
    size: int,
    hosts: Sequence[str],
    is_cut: bool,
    wanted: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second host answers with patience only, or not at all."""
    connect, patient = member_module._connect, []

    def connect_there(member: Member, is_suspect: bool) -> socket.socket:
        if member.host == HOSTS[1]:
            patient.extend([] if is_suspect else [member])
            if is_suspect or is_cut:
                raise TimeoutError
        return connect(member, is_suspect)

    monkeypatch.setattr(member_module, "_connect", connect_there)
    with job(size, hosts) as processes:
        living = [each for each in processes if each.member.host == HOSTS[0]]
        if not is_cut:
            processes[0].listener.close()  # its host says so, when it has the time to answer
        for outcome in outcomes(living, suspects=HOSTS[1:]):
            if wanted is None:
                assert isinstance(outcome, LeftOutError)
            else:
                assert isinstance(outcome, NextWorld), outcome
                assert [member.id for member in outcome.members] == wanted
    assert bool(patient) == (size == 2)


def test_one_that_was_left_out_hears_of_it() -> None:
    with job(3) as processes:
        for process in processes[:2]:
            process.roster = process.roster[:2]  # they have gone on without the third
        (error,) = outcomes(processes[2:])
        assert isinstance(error, LeftOutError)


def test_one_that_waited_for_another_leader_hears_that_it_was_left_out() -> None:
    with job(2) as processes, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(processes[1].regroup)
        assert pool.eventually(lambda: processes[0].listener.requests.qsize() == 1, 20)
        processes[0].roster = processes[0].roster[:1]
        processes[0].listener.dismiss_strangers()
        with pytest.raises(LeftOutError):
            waiting.result()


def test_newcomers_are_let_in_after_the_survivors() -> None:
    limits = Limits(30.0, 5.0, 1, takes_newcomers=True)
    with job(5) as processes, ThreadPoolExecutor(2) as threads:
        members, newcomers = processes[:3], processes[3:]
        for process in members:
            process.roster = [each.member for each in members]
        come_in = [
            threads.submit(come, lambda: members[0].roster, each.member, KEY, limits)
            for each in newcomers
        ]
        waiting = members[0].listener.newcomers
        assert pool.eventually(lambda: waiting.qsize() == 2, 20)
        groups = outcomes(members, limits) + [future.result() for future in come_in]
        assert groups == [groups[0]] * 5
        assert isinstance(groups[0], NextWorld)
        assert groups[0].members[:3] == members[0].roster
        assert len(groups[0].members) == 5
        assert groups[0].generation == 2


def test_newcomers_get_the_order_of_the_launcher() -> None:
    """They come in any order."""
    with job(1) as (process,), contextlib.ExitStack() as channels:
        for number in (10, 3, 4, 2):
            channel = dial(process.member, KEY, 5.0)
            channels.callback(channel.close)
            member = [member_id(f"{number}.1"), "127.0.0.1", 1]
            channel.send({"kind": "newcomer", "member": member, "call": 1})
            assert channel.receive(20.0) == {"kind": "alive"}  # it is in the queue
        found = [each.member.process for each in process.listener.take_newcomers()]
        assert found == ["2.1", "3.1", "4.1", "10.1"]


def test_a_newcomer_that_has_died_is_not_let_in() -> None:
    with job(1) as (process,):
        channel = dial(process.member, KEY, 5.0)
        channel.send({"kind": "newcomer", "member": ["p9", "127.0.0.1", 1], "call": 1})
        assert pool.eventually(lambda: process.listener.newcomers.qsize() == 1, 20)
        channel.close()
        assert process.listener.take_newcomers() == []


def test_a_newcomer_that_nobody_lets_in_gives_up() -> None:
    with job(1) as (process,), pytest.raises(hvd.TimeoutError, match="check_host_updates"):
        come(list, process.member, KEY, Limits(0.2, 5.0))


def test_directory() -> None:
    members = [Member("a", "127.0.0.1", 1), Member("b", "10.0.0.7", 2)]
    directory = Directory("127.0.0.1", KEY)
    try:
        assert ask_directory(directory.address, KEY) == []
        tell_directory(directory.address, KEY, 1, members[:1], is_first=True)
        tell_directory(directory.address, KEY, 2, members)
        tell_directory(directory.address, KEY, 1, members[:1])  # late, of an older world
        assert ask_directory(directory.address, KEY) == members
        tell_directory(directory.address, KEY, 3, members, is_first=True)  # of a second function
        assert directory.resets == 1
        with pytest.raises(hvd.RingError, match="directory"):
            ask_directory(directory.address, MessageKey(b"x" * 32))
    finally:
        directory.close()
    with pytest.raises(hvd.RingError, match="is gone"):
        ask_directory(directory.address, KEY)


def test_reach() -> None:
    with job(1) as (process,):
        assert reach(process.member, KEY, 5.0) is Reach.ALIVE
        with silent(process):
            assert reach(process.member, KEY, 0.2) is Reach.SILENT
        assert reach(process.member, KEY, 5.0) is Reach.GONE


def test_a_host_that_is_silent_already_gets_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s: list[float] = []

    def connect(_address: tuple[str, int], timeout_s: float) -> socket.socket:
        times_s.append(timeout_s)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    for is_suspect in (False, True):
        found = reach(Member("p0", "10.0.0.1", 1), KEY, 5.0, is_suspect=is_suspect)
        assert found is Reach.CUT_OFF
    patient_s, brief_s = times_s
    assert brief_s < patient_s / 2


@pytest.mark.skipif(os.geteuid() != 0, reason="sockets that vanish need root")
def test_a_process_that_dies_while_it_is_called_is_gone() -> None:
    """Its host says nothing of a connection that it has just taken for it."""

    def vanish() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR: it is closed silently
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=vanish)
        thread.start()
        member = Member("p0", *listener.getsockname())
        assert reach(member, KEY, 20.0) is Reach.GONE
        thread.join()


def test_a_stranger_is_not_answered() -> None:
    with job(1) as (process,):
        for request in ({"kind": "join", "member": ["p0", "", 1]}, {"kind": "probe"}):
            channel = dial(process.member, MessageKey(b"x" * 32), 5.0)
            channel.send(request)
            with pytest.raises(ConnectionError):
                channel.receive()
        with socket.create_connection(("127.0.0.1", process.member.port)) as connection:
            connection.sendall(b"\xff" * 100)
            connection.settimeout(20)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(4096):
                    received += part
            assert len(received) == 16  # the number that each caller gets
        assert process.listener.requests.empty()


def test_a_message_cannot_be_repeated() -> None:
    with contextlib.ExitStack() as stack:
        ours, theirs, again, other = map(
            stack.enter_context, (*socket.socketpair(), *socket.socketpair())
        )
        accepting = threading.Thread(target=lambda: Channel(theirs, KEY, "here", accepted=True))
        accepting.start()
        channel = Channel(ours, KEY, "here", accepted=False)
        accepting.join()
        channel.send({"kind": "probe"})
        message = theirs.recv(4096)
        theirs.sendall(message)
        with pytest.raises(ForeignMessageError):
            channel.receive(5.0)  # its own
        again.sendall(HELLO + message)
        with pytest.raises(ForeignMessageError):
            Channel(other, KEY, "here", accepted=True).receive(5.0)


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (hvd.RingError, 3),
        (hvd.MismatchError, 1),  # the program's
        (LeftOutError, 1),
    ],
)
@on_ranks(2)
def test_an_error_without_a_death_is_not_tried_again_for_ever(
    kind: type[hvd.RingError], calls: int
) -> None:
    tried = 0

    @hvd.elastic.run
    def train(_: hvd.elastic.ObjectState) -> None:
        nonlocal tried
        tried += 1
        raise kind("again")

    found = pool.error_of(lambda: train(hvd.elastic.ObjectState(step=0)))
    assert (found, tried) == ((kind.__name__, "again"), calls)
