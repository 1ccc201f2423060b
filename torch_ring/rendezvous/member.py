"""Member, dial: a process of an elastic job, and how another one reaches it."""

from __future__ import annotations

import enum
import secrets
import socket
from dataclasses import dataclass

from torch_ring.rendezvous.channel import Channel

__all__ = ["Member", "Reach", "dial", "member_id", "reach"]

# A kernel accepts connections for its processes, so this is time for the network alone. One lost
# packet is sent again after a second.
_CONNECT_S = 1.5
# The same, if the host is silent already. Farther than that no two hosts of a job are apart.
_SILENT_CONNECT_S = 0.1


@dataclass(frozen=True)
class Member:
    """A process of an elastic job.

    Attributes:
        id: a name that no other process has, also of those that come later; see `member_id`.
        host, port: where it listens for the others.
    """

    id: str
    host: str
    port: int

    @property
    def process(self) -> str:
        """The launcher's name of the process; empty: it has none."""
        return self.id.rpartition("-")[0]

    def packed(self) -> tuple[str, str, int]:
        """Return the member as it is sent: ``Member(*packed)`` is the same."""
        return self.id, self.host, self.port


def member_id(process: str) -> str:
    """Return a new name for a process that the launcher may have named, too."""
    return f"{process}-{secrets.token_hex(8)}"


class Reach(enum.Enum):
    """How far a process can be reached."""

    ALIVE = "answers"
    GONE = "has ended"  # nobody listens there, and its host says so
    CUT_OFF = "its host cannot be reached"
    SILENT = "does not answer"  # it is stopped, or its host is too busy


def dial(member: Member, key: bytes, answer_s: float, *, is_suspect: bool = False) -> Channel:
    """Return a channel to a member.

    Args:
        member: the process to reach.
        key: the key of the job.
        answer_s: seconds that its process has to answer, once its host has.
        is_suspect: whether its host is silent already, and is given less time to answer.

    Raises:
        OSError: it cannot be reached.
    """
    connection = _connect(member, is_suspect)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(answer_s)
        return Channel(connection, key, accepted=False)
    except BaseException:
        connection.close()
        raise


def reach(member: Member, key: bytes, answer_s: float, *, is_suspect: bool = False) -> Reach:
    """Return whether a member lives, as far as this process can tell. Arguments as of `dial`."""
    try:
        connection = _connect(member, is_suspect)
    except ConnectionRefusedError:
        return Reach.GONE
    except OSError:
        return Reach.CUT_OFF
    connection.settimeout(answer_s)
    channel = None
    try:
        channel = Channel(connection, key, accepted=False)
        channel.send({"kind": "probe"})
        channel.receive()
    except TimeoutError:
        return Reach.SILENT
    except OSError:  # it has ended meanwhile; or another program listens there now
        return Reach.GONE
    finally:
        connection.close()
    return Reach.ALIVE


def _connect(member: Member, is_suspect: bool) -> socket.socket:
    timeout_s = _SILENT_CONNECT_S if is_suspect else _CONNECT_S
    return socket.create_connection((member.host, member.port), timeout_s)
