"""Claim: a living world's ranks hold their names on their hosts, so that no rank is there twice.

Ranks that one process has started cannot be told from those of a second job of that process, if it
has given both jobs one name: two of its ranks may have met that belong to different jobs. So each
rank of a world listens at a name for as long as the world lives. A process that comes to be the
same rank asks there (`csrc/control/rank_claim.h` answers):

- one that was on its way when that world began may have been meant for it: it is refused, and the
  world ends, too, unless it is older than a minute;
- any other is a rank of another job, and takes the next name;
- a child of that rank has inherited its variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import socket
import time

from torch_ring.errors import RingError, TimeoutError
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.inherited import close_in_child
from torch_ring.rendezvous.network import ForeignUserError, require_same_user
from torch_ring.rendezvous.start import ancestors, started_ms

__all__ = ["Claim"]

_BACKLOG = 64
_PAUSE_S = 0.01
_IS_OTHERS, _IS_SAME = b"o", b"s"  # csrc/control/rank_claim.cc


class Claim:
    """One rank's claim to its name.

    Thread: one at a time. Blocking: `require_free` and `take`, until the deadline.

    Args:
        name: that at which the ranks of this host meet.
        start: what else tells its jobs apart.
        rank, size: this process; the number of ranks.
        is_new: whether this process has not been in a world yet. One that has been in one may have
            another rank in the next while others are still in the last.
    """

    def __init__(self, name: str, start: str, rank: int, size: int, *, is_new: bool) -> None:
        digest = hashlib.sha256(repr((name, start, rank)).encode()).hexdigest()
        self._prefix = f"\0torch_ring/claim/{digest[:32]}"
        self._rank, self._size, self._is_new = rank, size, is_new

    def require_free(self, deadline: Deadline) -> None:
        """Raise RingError if a process is this rank already. Cost: a connection that is refused."""
        for number in itertools.count() if self._is_new else ():
            if self._is_free(number, deadline):
                return

    def take(self, deadline: Deadline) -> socket.socket:
        """Return the listening socket of the claim.

        Raises:
            RingError: a process is this rank already.
            TimeoutError: one that has the name does not answer.
        """
        number = 0
        while True:
            listener = close_in_child(socket.socket(socket.AF_UNIX))
            try:
                listener.bind(f"{self._prefix}/{number}")
                listener.listen(_BACKLOG)
                listener.setblocking(False)
                return listener
            except OSError:  # it is taken
                listener.close()
            if not self._is_new or not self._is_free(number, deadline):
                number += 1

    def _is_free(self, number: int, deadline: Deadline) -> bool:
        """Return whether nobody has a name; False: a rank of another job has it."""
        while not deadline.passed():
            try:
                with socket.socket(socket.AF_UNIX) as question:
                    question.settimeout(max(0.01, min(60.0, deadline.left_s())))
                    question.connect(f"{self._prefix}/{number}")
                    holder = require_same_user(question)
                    self._require_no_child(holder)
                with socket.socket(socket.AF_UNIX) as question:
                    question.settimeout(max(0.01, min(60.0, deadline.left_s())))
                    text = f"{started_ms()}/{secrets.token_hex(8)}"
                    question.bind(f"\0torch_ring/ask/{text}")
                    question.connect(f"{self._prefix}/{number}")
                    answer = question.recv(1)
            except ConnectionRefusedError:
                return True
            except ForeignUserError:
                return False
            except OSError:  # its backlog is full, or it has just ended
                answer = b""
            if answer == _IS_OTHERS:
                return False
            if answer == _IS_SAME:
                raise RingError(
                    f"two processes are rank {self._rank} of {self._size}: process {holder} is, in "
                    "a world that began when this process was on its way. Two jobs of one name "
                    "that start together cannot be told apart: give each its own MASTER_PORT, "
                    "with MASTER_ADDR=127.0.0.1 if its ranks are on one host"
                )
            time.sleep(_PAUSE_S)
        raise TimeoutError(f"another process is rank {self._rank}, and has not answered {deadline}")

    def _require_no_child(self, holder: int) -> None:
        parents: list[int] = []
        with contextlib.suppress(OSError):
            parents.extend(ancestors(os.getpid()))
        if holder in parents:
            raise RingError(
                f"rank {self._rank} of {self._size} is process {holder}, which has started this "
                "one: it has inherited that rank's variables. Start it without them (RANK, "
                "WORLD_SIZE and MASTER_PORT, or those of your launcher) if it is to be alone, or "
                "give it a rank, a size and a MASTER_PORT of its own job"
            )
