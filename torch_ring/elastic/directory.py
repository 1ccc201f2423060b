"""Directory: where newcomers learn who the members of an elastic job are. The launcher has it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch_ring.elastic.channel import Channel
from torch_ring.elastic.member import Member, dial
from torch_ring.elastic.server import Server
from torch_ring.errors import RingError

__all__ = ["Directory", "ask_directory", "tell_directory"]

_ANSWER_S = 5.0


class Directory:
    """The members of the last world, as its rank 0 has told.

    Thread: any. Blocking: no.

    Args:
        host: the address to listen at.
        key: the key of the job.

    Attributes:
        address: "host:port", for the variable TORCH_RING_ELASTIC_DIRECTORY.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self._lock = threading.Lock()
        self._generation, self._members = 0, []  # type: tuple[int, list[Any]]
        self._server = Server(host, key, self._answer)
        self.address = f"{host}:{self._server.port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _answer(self, channel: Channel, request: dict[str, Any]) -> None:
        with self._lock:
            if request["kind"] == "roster" and request["generation"] > self._generation:
                self._generation, self._members = request["generation"], request["members"]
            answer = {"kind": "roster", "members": self._members}
        channel.send(answer)


def tell_directory(address: str, key: bytes, generation: int, members: Sequence[Member]) -> None:
    """Tell the directory the members of a new world.

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
        },
    )


def ask_directory(address: str, key: bytes) -> Sequence[Member]:
    """Return the members of the last world; none if there was none yet.

    Raises:
        RingError: the directory cannot be reached.
    """
    return [Member(*each) for each in _call(address, key, {"kind": "who"})["members"]]


def _call(address: str, key: bytes, request: dict[str, Any]) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    try:
        channel = dial(Member("directory", host, int(port)), key, _ANSWER_S)
    except OSError as error:
        raise RingError(f"the launcher's directory at {address} is gone: {error}") from None
    try:
        channel.send(request)
        return channel.receive()
    except OSError as error:
        raise RingError(f"the launcher's directory at {address}: {error}") from None
    finally:
        channel.close()
