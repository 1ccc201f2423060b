"""Start: which processes were started together, where several jobs can have one name.

Two scripts may have the same MASTER_ADDR and MASTER_PORT, which a user need not have set. The
ranks of one job are started by one process as a rule: by a script, a shell, or the parent of
multiprocessing. But a user may start them in several terminals, too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch_ring.errors import RingError
from torch_ring.rendezvous.launchers import LAUNCHERS, Identity

__all__ = ["Start", "ancestors", "is_stopped", "start_of", "started_ms", "starter"]

Arg = TypeVar("Arg")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Start:
    """The start of a job to which this process belongs.

    Attributes:
        name: the process that has started its ranks; empty: the job's own name tells jobs apart,
            or nothing does.
        launcher: a key of `LAUNCHERS`.
        port: MASTER_PORT.
    """

    name: str = ""
    launcher: str = ""
    port: str = ""

    def lacks(self, starts: Collection[str], here: Collection[int]) -> bool:
        """Return whether a process of one of `starts` is on its way that looks like those `here`.

        It has their command line but for the numbers, and is no child or parent of theirs. Cost: a
        look at all processes of the host.
        """
        alike = {_command(pid) for pid in here} - {b""}
        related = {pid for one in here for pid in _seen(ancestors, one)}
        for pid in [int(name) for name in _seen(os.listdir, "/proc") if name.isdecimal()]:
            if pid in here or pid in related or _command(pid) not in alike:
                continue
            if any(parent in here for parent in _seen(ancestors, pid)):
                continue
            ports = [e[12:] for e in _environment(pid) if e.startswith(b"MASTER_PORT=")]
            if ports and ports != [os.fsencode(self.port)]:
                continue
            with contextlib.suppress(RingError):
                if starter(self.launcher, pid) in starts:
                    return True
        return False


def start_of(identity: Identity) -> Start:
    """Return the start of this process."""
    port = os.environ.get("MASTER_PORT", "")
    with contextlib.suppress(RingError):
        if not identity.job:
            return Start(starter(identity.launcher, os.getpid()), identity.launcher, port)
    return Start()


def starter(launcher: str, pid: int) -> str:
    """Return the process that started all ranks of this host, as "<pid>.<start time>".

    That is the nearest ancestor without a rank of its own: mpirun, Hydra's proxy, Slurm's step
    daemon, a script.

    Raises:
        RingError: it cannot be seen.
    """
    known = LAUNCHERS.get(launcher)
    prefix = known.rank.encode() + b"=" if known else None
    with contextlib.suppress(OSError):  # no /proc, or it hides other users' processes
        for parent in ancestors(pid):
            try:
                environment = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
            except PermissionError:
                continue  # a wrapper such as sudo, which runs as another user
            if prefix is None or not any(entry.startswith(prefix) for entry in environment):
                return f"{parent}.{_stat(parent)[19]}"
    raise RingError(f"the process that started process {pid} cannot be seen")


def ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on."""
    while (pid := int(_stat(pid)[1])) > 0:
        yield pid


def started_ms() -> int:
    """Return when this process was started, in milliseconds since the boot; 0: nobody knows."""
    with contextlib.suppress(OSError):
        return int(_stat(os.getpid())[19]) * 1000 // os.sysconf("SC_CLK_TCK")
    return 0


def is_stopped(pid: int) -> bool:
    """Return whether a process is seen to be stopped, by a signal or a debugger."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0] in "Tt"
    return False


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _command(pid: int) -> bytes:
    """Return the command line with all numbers made equal; empty: it has ended, or is unseen."""
    with contextlib.suppress(OSError):
        return re.sub(rb"\d+", b"0", Path(f"/proc/{pid}/cmdline").read_bytes())
    return b""


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _seen(list_of: Callable[[Arg], Iterable[Item]], of: Arg) -> list[Item]:
    """Return a list that is read from /proc, as far as it goes: processes end meanwhile."""
    found: list[Item] = []
    with contextlib.suppress(OSError):
        found.extend(list_of(of))
    return found
