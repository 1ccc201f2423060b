# SPDX-License-Identifier: Apache-2.0
"""Two jobs of one name on one host do not mix: `starter`, `is_awaited`, `claim_rank`.

Two scripts may have the same MASTER_ADDR and MASTER_PORT, perhaps by default. Usually one process
starts all ranks of a job: a script, a shell, or the parent of multiprocessing. So ranks that
different processes have started, in several terminals, make a world only when no rank of these
starts is on its way (`is_awaited`).

But one process may start two jobs of one name: then ranks of different jobs may have met. So each
rank listens at a name from its meeting with others to the end of the world. A process with the same
rank asks there (`csrc/control/rank_claim.h` answers):

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
from collections.abc import Callable, Iterator
from pathlib import Path

from torch_ring.errors import RingError, TimeoutError
from torch_ring.setup.launchers import LAUNCHERS, Identity
from torch_ring.setup.network import Deadline, ForeignUserError, listen_unix, require_same_user

__all__ = ["ancestors", "claim_rank", "is_awaited", "is_stopped", "starter"]


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
_ANSWER_S = 1.0  # a rank that is in no world yet answers later
_IS_OTHERS, _IS_SAME = b"o", b"s"  # csrc/control/rank_claim.cc


@contextlib.contextmanager
def claim_rank(
    name: str | None,
    start: str,
    identity: Identity,
    deadline: Deadline,
    watch: Callable[[float], object],
    *,
    is_new: bool,
) -> Iterator[socket.socket | None]:
    """Context that holds the listening socket of this rank's claim.

    Enter it before the ranks of this host are complete, but after this one has met others: a rank
    that comes too late to meet them finds the claims of all.

    Args:
        name: the name at which the ranks of this host meet; None: no other job can have it.
        start: the process that started them, which also tells jobs of that name apart.
        identity: this process.
        deadline: the deadline of init().
        watch: called while it waits, for some seconds.
        is_new: whether this process has not been in a world yet. If it has been in one, it may have
            another rank in the next, while others are still in the last.

    Raises:
        RingError: another process is this rank already.
        TimeoutError: the holder of the name does not answer.
    """
    if name is None:
        yield None
        return
    digest = hashlib.sha256(repr((name, start, identity.rank)).encode()).hexdigest()
    prefix, number = f"\0torch_ring/claim/{digest[:32]}/", 0
    me = f"rank {identity.rank} of {identity.size}"
    while (claim := _listen(f"{prefix}{number}")) is None:
        if not is_new or _is_others(f"{prefix}{number}", me):
            number += 1
        elif deadline.passed():
            raise TimeoutError(f"another process is {me}, and has not answered {deadline}")
        else:
            watch(_PAUSE_S)
    with claim:
        yield claim


def _listen(name: str) -> socket.socket | None:
    try:
        return listen_unix(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _is_others(name: str, me: str) -> bool:
    """Return whether a rank of another job has a name; False: try again. Blocks for a second."""
    try:
        with socket.socket(socket.AF_UNIX) as look:
            look.settimeout(_ANSWER_S)
            look.connect(name)
            holder = require_same_user(look)
        if holder in ancestors(os.getpid()):
            raise RingError(
                f"{me} is process {holder}, which has started this one: it has inherited that "
                "rank's variables. Start it without them (RANK, WORLD_SIZE and MASTER_PORT, or "
                "those of your launcher) if it is to be alone, or give it a rank, a size and a "
                "MASTER_PORT of its own job"
            )
        with socket.socket(socket.AF_UNIX) as question:
            question.settimeout(_ANSWER_S)
            question.bind(f"\0torch_ring/ask/{started_ms()}/{secrets.token_hex(8)}")
            question.connect(name)
            answer = question.recv(1)
    except ForeignUserError:
        return True
    except OSError:  # it is still joining, its backlog is full, or it has just ended
        return False
    if answer == _IS_SAME:
        raise RingError(
            f"two processes are {me}: process {holder} is, in a world that began while this "
            "process was joining. Two jobs of one name that start together cannot be told apart: "
            "give each its own MASTER_PORT, with MASTER_ADDR=127.0.0.1 if its ranks are on one host"
        )
    return answer == _IS_OTHERS
