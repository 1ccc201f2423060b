"""Ready, Output, Exited, ...: what hosts, ranks and the system tell the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "Ended",
    "Event",
    "Exited",
    "Lost",
    "Note",
    "Output",
    "Ready",
    "Signal",
    "Unread",
    "Unstartable",
    "event_of",
]


@dataclass(frozen=True)
class Ready:
    """The agent of a host runs.

    Attributes:
        port: a port that nobody listens at there.
        server: the address at which ssh has reached the host; empty on the launcher's own.
        interface_address: of the network interface that the user has chosen; empty: none.
        problem: why no rank can run there; empty: none.
    """

    host: str
    port: int
    server: str
    interface_address: str
    problem: str


@dataclass(frozen=True)
class Output:
    """A rank has written; `stream` is "stdout", "stderr" or "result"."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Exited:
    """The process of a rank has ended; a negative code is that of a signal."""

    rank: int
    code: int


@dataclass(frozen=True)
class Unstartable:
    """The command of a rank cannot be run; the code is that of a shell."""

    rank: int
    code: int
    text: str


@dataclass(frozen=True)
class Note:
    """Something that the user should know of a host."""

    host: str
    text: str


@dataclass(frozen=True)
class Ended:
    """The agent of a host has ended its ranks; `left` processes could not be ended."""

    host: str
    left: int


@dataclass(frozen=True)
class Lost:
    """The agent of a host has gone, or is not reached any more."""

    host: str
    reason: str


@dataclass(frozen=True)
class Signal:
    """The launcher has got a signal."""

    number: int


@dataclass(frozen=True)
class Unread:
    """Nobody reads the launcher's own output any more: "stdout" or "stderr"."""

    stream: str


Event = Ready | Output | Exited | Unstartable | Note | Ended | Lost | Signal | Unread


def event_of(host: str, header: dict[str, Any], payload: bytes) -> Event:
    """Return what a frame of an agent says."""
    kind = header["event"]
    if kind == "output":
        return Output(header["rank"], header["stream"], payload)
    if kind == "exited":
        return Exited(header["rank"], header["code"])
    if kind == "unstartable":
        return Unstartable(header["rank"], header["code"], header["text"])
    if kind == "note":
        return Note(host, header["text"])
    if kind == "ended":
        return Ended(host, header["left"])
    ssh = header["ssh"].split()  # the client's address and port, the server's address and port
    server = ssh[2] if len(ssh) == 4 else ""
    problem = header.get("problem", "")
    return Ready(host, header["port"], server, header["interface_address"], problem)
