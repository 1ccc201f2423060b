"""forked(): forks ranks from this process, which has imported all modules already."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, NoReturn

from namespaces import Host
from start_line import GATES, SIGNALS, Line, Ranks, die_with_parent, signals_taken

FORK_S = 120.0  # until all ranks have been forked and are ready
LEAVE_S = 60.0  # until all ranks have left, before they are killed


@dataclass
class Family:
    """The children of this process that have not been waited for, by rank."""

    pids: dict[int, int] = field(default_factory=dict)

    def obituary(self, ranks: Collection[int], output: IO[bytes]) -> str | None:
        """Return the death of one of the ranks in words, with the last line that a rank printed."""
        for rank in sorted(ranks):
            if rank in self.pids and (status := self._reap(rank)) is not None:
                return f"rank {rank} {how_it_ended(status)}{last_line(output)}"
            if rank not in self.pids:
                return f"rank {rank} has ended{last_line(output)}"
        return None

    def wait(self, deadline_s: float) -> None:
        """Wait until all have ended, or the deadline."""
        deadline = time.monotonic() + deadline_s
        while self.pids and time.monotonic() < deadline:
            for rank in list(self.pids):
                self._reap(rank)
            with signals_taken():
                time.sleep(0.01)

    def kill(self) -> int:
        """Kill the remaining children; return their number."""
        left = len(self.pids)
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids.values():
            os.waitpid(pid, 0)
        self.pids.clear()
        return left

    def _reap(self, rank: int) -> int | None:
        pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
        if pid == 0:
            return None
        del self.pids[rank]
        return os.waitstatus_to_exitcode(status)


@contextmanager
def forked(
    size: int,
    body: Callable[[Line], None],
    environment: Callable[[int], Mapping[str, str]],
    hosts: Sequence[Host] = (),
) -> Iterator[Ranks]:
    """Fork ranks that run `body`; when the context ends, open the last gates, and end them all.

    A thread does not survive a fork, but a lock that it holds does: this process must have none.

    Args:
        environment: returns a rank's variables, as a launcher would set them.
        hosts: namespaces with equally many ranks; empty: all ranks stay in this process's.
    """
    if len(threads := os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"a process with {len(threads)} threads must not fork ranks")
    gc.freeze()  # otherwise a collection in a child would write to, and so copy, every object
    family, parent = Family(), os.getpid()
    with contextlib.ExitStack() as cleanup:
        output = cleanup.enter_context(tempfile.TemporaryFile())
        reports, gates = os.pipe(), [os.pipe() for _ in range(GATES)]
        writes = [write for _, write in gates]
        for read_end in (*reports, *(read for read, _ in gates)):
            cleanup.callback(os.close, read_end)
        ranks = Ranks(size, reports[0], writes, lambda some: family.obituary(some, output))
        cleanup.callback(ranks.close_gates)
        cleanup.callback(family.kill)
        for rank in range(size):
            host = hosts[rank * len(hosts) // size] if hosts else None
            theirs = environment(rank)  # here: after an error a child would go on as this program
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            if (pid := os.fork()) == 0:
                ours = [reports[0], *writes]
                line = Line(rank, size, reports[1], [read for read, _ in gates])
                be_rank(line, body, theirs, host, output.fileno(), ours, parent)
            family.pids[rank] = pid
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            with signals_taken():
                pass  # handles signals: forking many ranks takes seconds
        yield ranks
        ranks.close_gates()
        family.wait(LEAVE_S)
        if left := family.kill():
            print(f"# {left} of {size} ranks had to be killed", file=sys.stderr, flush=True)


def be_rank(
    line: Line,
    body: Callable[[Line], None],
    environment: Mapping[str, str],
    host: Host | None,
    output: int,
    not_ours: Sequence[int],
    parent: int,
) -> NoReturn:
    """Run as a rank, and never return to the code that has forked it."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for end in not_ours:
            os.close(end)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if host:
            host.enter()
        os.environ.update(environment)
        body(line)
        code = 0
    except BaseException as error:
        line.report(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    finally:
        os._exit(code)


def how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def last_line(output: IO[bytes]) -> str:
    """Return the last line of the ranks' output, after a colon; "" if there is none."""
    size = os.fstat(output.fileno()).st_size
    end = os.pread(output.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
    lines = end.strip().splitlines()
    return f": {lines[-1]}" if lines else ""
