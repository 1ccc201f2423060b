"""join: the ranks of a host find one another by the name of a Unix socket.

Whoever binds the name leads; the others connect and send their cards. A leader hears of the failure
or the end of one of them before it takes in another connection, so that a rank which tries again
never gets into the meeting that has failed.

Two jobs may have one name. Ranks of the leader's own start are let in at once; those of another one
wait (`LocalLeader`).
"""

from __future__ import annotations

import errno
import logging
import socket
import time

from torch_ring.errors import RingError, TimeoutError
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.local_leader import LocalLeader, listen
from torch_ring.rendezvous.local_member import ApartError, LocalMember, connect
from torch_ring.rendezvous.network import ForeignUserError
from torch_ring.rendezvous.start import Start

__all__ = ["join"]

_log = logging.getLogger("torch_ring")

_PAUSE_S = 0.005  # between two attempts to find the leader


def join(
    name: str | None,
    rank: int,
    size: int,
    deadline: Deadline,
    until: Deadline,
    start: Start,
) -> LocalLeader | LocalMember:
    """Find the other ranks of this host, or be the first.

    Args:
        name: the socket's name; None: there is none to meet by, the rank leads itself.
        rank: this process.
        size: the number of ranks of the world.
        deadline: the deadline of init().
        until: when to go on alone if the name is in other hands; `deadline` if that is no use.
        start: to which this process belongs.

    Raises:
        TimeoutError: whoever has the name has not let this rank in before the deadline.
        RingError: this init() has failed on another rank; or a process of another user has the
            name, and it is no use to go on alone.
    """
    if name is None:
        return LocalLeader(None, rank, size, deadline)
    while True:
        listener = _bind(name)
        if listener is not None:
            return LocalLeader(listener, rank, size, deadline, start)
        try:
            member = connect(name, rank, size, deadline, until, start.name)
            if member is not None:
                return member
        except ApartError:
            name = f"{name}/{start.name}"
            continue
        except RingError:
            raise  # this init() has failed
        except ForeignUserError as error:
            taken = (
                "the name of the socket at which the ranks of this host meet is in use by a "
                f"process of user {error.user}"
            )
            if until is deadline:
                raise RingError(
                    f"{taken}: end it, or start the job with another MASTER_PORT"
                ) from None
            _log.warning("%s: rank %d goes on without the others of its host", taken, rank)
            return LocalLeader(None, rank, size, deadline)
        except (OSError, EOFError, ValueError) as error:  # its leader is just coming or going
            _log.debug("rank %d found no leader: %s", rank, error)
        if deadline.passed():
            raise TimeoutError(
                f"the ranks of this host could not meet {deadline}: the process that has their "
                "socket's name does not answer, or it waits for ranks that another process has "
                "started: is another job starting with the same MASTER_ADDR and MASTER_PORT?"
            )
        if until.passed():
            return LocalLeader(None, rank, size, deadline)
        time.sleep(_PAUSE_S)


def _bind(name: str) -> socket.socket | None:
    """Return a listener, or None if somebody else has the name."""
    try:
        return listen(name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise
