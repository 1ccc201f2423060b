"""Two jobs of one name on one host do not mix: `starter`, `is_awaited`, `Claim`.

Two scripts may have the same MASTER_ADDR and MASTER_PORT, perhaps by default. Usually one process
starts all ranks of a job: a script, a shell, or the parent of multiprocessing. So ranks that
different processes have started, in several terminals, make a world only when no rank of these
starts is on its way (`is_awaited`).

But one process may start two jobs of one name: then ranks of different jobs may have met. So each
rank of a world listens at a name for as long as the world lives. A process with the same rank asks
there (`csrc/control/rank_claim.h` answers):

- if it was starting when that world began, it may have been meant for it: it is refused, and the
  world ends, too, unless it is older than a minute;
- if it is a child of that rank, it has inherited the rank's variables, and is refused;
- any other process is a rank of another job, and takes the next name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from torch_ring.errors import RingError, TimeoutError
from torch_ring.setup.launchers import LAUNCHERS
from torch_ring.setup.network import Deadline, ForeignUserError, listen_unix, require_same_user

__all__ = ["Claim", "ancestors", "is_awaited", "is_stopped", "starter"]


def is_awaited(here: set[int], launcher: str) -> bool:
    """Return whether another rank of the starts of the processes `here` is on its way.

    It has the command line of one of them except for numbers, and no other MASTER_PORT; and it is
    no child or parent of theirs. Cost: a look at all processes of the host.
    """
    starts = {starter(launcher, pid) for pid in here} - {""}
    alike = {_command(pid) for pid in here} - {b""}
    related = here.union(*map(ancestors, here))
    port = os.fsencode("MASTER_PORT=" + os.environ.get("MASTER_PORT", ""))
    for pid in [int(path.name) for path in Path("/proc").glob("[0-9]*")]:
        if pid in related or _command(pid) not in alike or here.intersection(ancestors(pid)):
            continue
        with contextlib.suppress(OSError):  # it has just ended
            ports = [entry for entry in _environment(pid) if entry.startswith(b"MASTER_PORT=")]
            if ports in ([], [port]) and starter(launcher, pid) in starts:
                return True
    return False


def starter(launcher: str, pid: int) -> str:
    """Return the process that started all ranks of this host, as "<pid>.<start time>".

    It is the nearest ancestor without a rank of its own: mpirun, Hydra's proxy, Slurm's step
    daemon, a script. Empty: it cannot be seen.
    """
    known = LAUNCHERS.get(launcher)
    prefix = known.rank.encode() + b"=" if known else None
    with contextlib.suppress(OSError):  # it has just ended
        for parent in ancestors(pid):
            try:
                environment = _environment(parent)
            except PermissionError:
                continue  # a wrapper of another user, such as sudo
            if prefix is None or not any(entry.startswith(prefix) for entry in environment):
                return f"{parent}.{_stat(parent)[19]}"
    return ""


def ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on, as far as they can be seen."""
    with contextlib.suppress(OSError):  # they end meanwhile; no /proc, or it hides other users'
        while (pid := int(_stat(pid)[1])) > 0:
            yield pid


def started_ms() -> int:
    """Return this process's start time in milliseconds since the boot; 0: unknown."""
    with contextlib.suppress(OSError):
        return int(_stat(os.getpid())[19]) * 1000 // os.sysconf("SC_CLK_TCK")
    return 0


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger; False if it is unseen."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0] in "Tt"
    return False


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _command(pid: int) -> bytes:
    """Return the command line with all numbers made equal; empty: the process has ended."""
    with contextlib.suppress(OSError):
        return re.sub(rb"\d+", b"0", Path(f"/proc/{pid}/cmdline").read_bytes())
    return b""


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


_PAUSE_S = 0.01
_IS_OTHERS, _IS_SAME = b"o", b"s"  # csrc/control/rank_claim.cc


class Claim:
    """One rank's claim to its name.

    Thread: one at a time. Blocking: `take`, until the deadline.

    Args:
        name: the name at which the ranks of this host meet.
        start: the process that started them, which also tells jobs of that name apart.
        rank, size: this process's rank, and the number of ranks.
        is_new: whether this process has not been in a world yet. If it has been in one, it may have
            another rank in the next, while others are still in the last.
    """

    def __init__(self, name: str, start: str, rank: int, size: int, *, is_new: bool) -> None:
        digest = hashlib.sha256(repr((name, start, rank)).encode()).hexdigest()
        self._prefix = f"\0torch_ring/claim/{digest[:32]}"
        self._rank, self._size, self._is_new = rank, size, is_new

    def take(self, deadline: Deadline) -> socket.socket:
        """Return the listening socket of the claim. Cost: two connections for each other job.

        Raises:
            RingError: another process is this rank already.
            TimeoutError: the holder of the name does not answer.
        """
        number = 0
        while True:
            name = f"{self._prefix}/{number}"
            try:
                return listen_unix(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            if not self._is_new or self._is_others(name, deadline):
                number += 1
            elif deadline.passed():
                raise TimeoutError(
                    f"another process is rank {self._rank}, and has not answered {deadline}"
                )
            else:
                time.sleep(_PAUSE_S)

    def _is_others(self, name: str, deadline: Deadline) -> bool:
        """Return whether a rank of another job has a name; False: try again."""
        answer = b""
        try:
            with socket.socket(socket.AF_UNIX) as look:
                look.settimeout(max(0.01, min(60.0, deadline.left_s())))
                look.connect(name)
                holder = require_same_user(look)
            if holder in ancestors(os.getpid()):
                raise RingError(self._inherited(holder))
            with socket.socket(socket.AF_UNIX) as question:
                question.settimeout(max(0.01, min(60.0, deadline.left_s())))
                question.bind(f"\0torch_ring/ask/{started_ms()}/{secrets.token_hex(8)}")
                question.connect(name)
                answer = question.recv(1)
        except ForeignUserError:
            return True
        except OSError:  # its backlog is full, or it has just ended
            return False
        if answer == _IS_SAME:
            raise RingError(
                f"two processes are rank {self._rank} of {self._size}: process {holder} is, in "
                "a world that began while this process was joining. Two jobs of one name "
                "that start together cannot be told apart: give each its own MASTER_PORT, "
                "with MASTER_ADDR=127.0.0.1 if its ranks are on one host"
            )
        return answer == _IS_OTHERS

    def _inherited(self, holder: int) -> str:
        return (
            f"rank {self._rank} of {self._size} is process {holder}, which has started this one: "
            "it has inherited that rank's variables. Start it without them (RANK, WORLD_SIZE and "
            "MASTER_PORT, or those of your launcher) if it is to be alone, or give it a rank, a "
            "size and a MASTER_PORT of its own job"
        )
