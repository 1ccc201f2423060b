# SPDX-License-Identifier: Apache-2.0
"""Directory: the launcher's list of an elastic job's ranks, which its processes ask for."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_ring.errors import RingError
from torch_ring.membership.member import Channel, Member, MessageKey, Server, dial

__all__ = [
    "Directory",
    "Gathering",
    "ask_directory",
    "ask_for_place",
    "notify",
    "tell_directory",
    "tell_leaving",
]


@dataclass(frozen=True)
class _Asker:
    """A process that asks for a place: its unique question, and the address of its listener."""

    question: str
    host: str
    port: int


class Gathering:
    """Gives each living process a place in a world, when all of them have asked.

    The launcher holds it, and knows which processes live. If a process dies before its world is
    made, the others ask once more.

    Thread: any. Blocking: no.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: Mapping[str, int] = {}
        self._askers: dict[str, _Asker] = {}
        self._answers: dict[str, tuple[str, dict[str, Any]]] = {}  # question and answer

    def expect(self, processes: Mapping[str, int]) -> None:
        """Note which processes live.

        Args:
            processes: the launcher's ranks of the living processes, by name, in their order.
        """
        with self._lock:
            self._expected = dict(processes)
            self._answer()

    def ask(self, process: str, question: str, host: str, port: int) -> dict[str, Any]:
        """Return the place of a process; or the ranks that are missing: then ask again.

        Args:
            process: its name.
            question: a text that stays the same while it asks for the same world.
            host: the host of the address at which it can serve a store for the others.
            port: the port of that address.

        Returns:
            ``{"kind": "place", "processes": names by rank, "store": [host, port]}``, with the
            address that rank 0 has given; ``{"kind": "void", "gone": ranks}`` if some ranks have
            ended since then; or ``{"kind": "wait", "here": ranks, "missing": ranks}``, which are
            the living ranks.
        """
        with self._lock:
            answered, answer = self._answers.get(process, ("", {}))
            if answered != question:
                self._askers[process] = _Asker(question, host, port)
                self._answer()
                answered, answer = self._answers.get(process, ("", {}))
            if answered == question:
                processes = enumerate(answer["processes"])
                gone = [rank for rank, each in processes if each not in self._expected]
                return {"kind": "void", "gone": gone} if gone else answer
            here = [rank for each, rank in self._expected.items() if each in self._askers]
            missing = set(self._expected.values()).difference(here)
            return {"kind": "wait", "here": sorted(here), "missing": sorted(missing)}

    def _answer(self) -> None:
        """Answer all living processes, if all of them have asked."""
        living = self._expected
        if not living or not living.keys() <= self._askers.keys():
            return
        askers = [self._askers.pop(process) for process in living]
        answer = {
            "kind": "place",
            "processes": list(living),
            "store": [askers[0].host, askers[0].port],
        }
        for process, asker in zip(living, askers, strict=True):
            self._answers[process] = asker.question, answer


_ANSWER_S = 5.0


class Directory:
    """The members of the last world, as reported by its rank 0, or the candidates for the first.

    Thread: any. Blocking: `ask_to_leave` only.

    Args:
        host: the address to listen at.
        key: the key of the job.

    Attributes:
        address: "host:port", for the variable TORCH_RING_ELASTIC_DIRECTORY.
    """

    def __init__(self, host: str, key: MessageKey) -> None:
        self._lock = threading.Lock()
        self._key = key
        self._generation = 0
        self._functions = 0
        self._members: Sequence[Member] = ()
        self._processes: set[str] = set()
        self._leaving: set[str] = set()
        self._gathering = Gathering()
        self._server = Server(host, key, self._answer)
        self.address = f"{host}:{self._server.port}"

    @property
    def generation(self) -> int:
        """The number of worlds so far; 0: none has been reported."""
        with self._lock:
            return self._generation

    @property
    def resets(self) -> int:
        """The number of changes of the ranks."""
        with self._lock:
            return max(0, self._generation - max(1, self._functions))

    def has_had(self, process: str) -> bool:
        """Return whether a process, named by the launcher, was a member of any world."""
        with self._lock:
            return process in self._processes

    def is_left_by(self, process: str) -> bool:
        """Return whether a process, named by the launcher, has said that it leaves the job."""
        with self._lock:
            return process in self._leaving

    def ask_to_leave(self, processes: Collection[str]) -> None:
        """Ask members to leave at the next step boundary. Blocks for seconds if a host is gone.

        Processes that do not answer are skipped: they have left, or will be found missing.
        """
        with self._lock:
            members = self._members
        asked = [m for m in members if m.process in processes and notify(m, self._key, "leave")]
        if asked:  # rank 0 last: it tells all ranks, and the leavers must know by then
            notify(members[0], self._key, "hosts")

    def expect(self, processes: Mapping[str, int]) -> None:
        """Note which of the job's first processes live, and their ranks."""
        self._gathering.expect(processes)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _answer(self, channel: Channel, request: dict[str, Any]) -> None:
        with self._lock:
            if request["kind"] == "roster" and request["generation"] > self._generation:
                self._generation = request["generation"]
                self._functions += request["is_first"]
                self._members = [Member(*each) for each in request["members"]]
                self._processes |= {member.process for member in self._members}
            elif request["kind"] == "leaving":
                self._leaving.add(request["process"])
            packed = [member.packed() for member in self._members]
            has_begun = self._generation > 0
        if request["kind"] == "place":
            answer: dict[str, Any] = {"kind": "begun"}
            if not has_begun:
                answer = self._gathering.ask(*request["asker"])
            channel.send(answer)
            return
        channel.send({"kind": "roster", "members": packed})


def notify(member: Member, key: MessageKey, kind: str) -> bool:
    """Send a message of `kind` to a process's `Listener`. Blocks for seconds if its host is gone.

    Returns:
        Whether the process has received it.
    """
    try:
        channel = dial(member, key, _ANSWER_S)
    except OSError:
        return False
    try:
        channel.send({"kind": kind})
        channel.receive()
    except OSError:
        return False
    finally:
        channel.close()
    return True


def tell_directory(
    address: str,
    key: MessageKey,
    generation: int,
    members: Sequence[Member],
    *,
    is_first: bool = False,
) -> None:
    """Tell the directory the members of a new world. `is_first`: an elastic function's first world.

    Raises:
        RingError: it cannot be reached: the launcher has ended.
    """
    _call(
        address,
        key,
        {
            "kind": "roster",
            "generation": generation,
            "members": [member.packed() for member in members],
            "is_first": is_first,
        },
    )


def tell_leaving(address: str, key: MessageKey, process: str) -> None:
    """Tell the directory that a process, named by the launcher, leaves the job of its own accord.

    Raises:
        RingError: it cannot be reached: the launcher has ended.
    """
    _call(address, key, {"kind": "leaving", "process": process})


def ask_directory(address: str, key: MessageKey) -> Sequence[Member]:
    """Return the members of the last world; empty if there was none yet.

    Raises:
        RingError: the directory cannot be reached.
    """
    return [Member(*each) for each in _call(address, key, {"kind": "who"})["members"]]


def ask_for_place(
    address: str, key: MessageKey, process: str, question: str, host: str, port: int
) -> dict[str, Any]:
    """Ask for a place in the first world; return the answer of `Gathering.ask`.

    It is ``{"kind": "begun"}`` if members have reported a world: they find one another themselves.

    Raises:
        RingError: the directory cannot be reached.
    """
    asker = [process, question, host, port]
    return _call(address, key, {"kind": "place", "asker": asker})


def _call(address: str, key: MessageKey, request: dict[str, Any]) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    try:
        channel = dial(Member("directory", host, int(port)), key, _ANSWER_S)
    except OSError as error:
        raise RingError(
            f"the launcher's directory at {address} is gone, or has another TORCH_RING_TLS: {error}"
        ) from None
    try:
        channel.send(request)
        return channel.receive()
    except OSError as error:
        raise RingError(f"the launcher's directory at {address}: {error}") from None
    finally:
        channel.close()
