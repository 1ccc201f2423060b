"""Ranks and Line: the two ends of the pipes between a program and the ranks that it has started.

All ranks wait in `Line.wait()` until the program calls `Ranks.open_gate()`, which wakes them all at
once; with `Line.report()` they answer. All reports go through one pipe, and a gate opens by closing
a pipe. So no thread is needed, and ranks do not wait for a dead program.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COUNT = 256  # elements of the first allreduce: 1 KiB of float32
GATES = 3  # begin; report the costs; leave
CHECK_S = 0.2  # between two looks for ranks that have died
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Report = dict[str, Any]


@contextmanager
def signals_taken() -> Iterator[None]:
    """Context that unblocks Ctrl-C and SIGTERM during a wait.

    A program that blocks them from its start is interrupted only here, never half-way through work.
    """
    held = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


class WorldError(Exception):
    """A rank has failed, has died or has not answered in time; the text is its reason."""


@dataclass
class Line:
    """The rank's end.

    Attributes:
        reports: the pipe of all ranks' reports.
        gates: pipes, in the order in which they will be closed.
    """

    rank: int
    size: int
    reports: int
    gates: list[int]

    def report(self, **facts: Any) -> None:
        """Send a line, short enough to be written in one piece."""
        for name, value in facts.items():
            if isinstance(value, str):
                facts[name] = value[:500]
        line = json.dumps({"rank": self.rank, **facts}).encode() + b"\n"
        assert len(line) <= select.PIPE_BUF
        os.write(self.reports, line)

    def wait(self) -> None:
        """Wait until the program opens the next gate."""
        gate = self.gates.pop(0)
        os.read(gate, 1)
        os.close(gate)


@dataclass
class Ranks:
    """The program's end.

    Attributes:
        gates: pipes that the ranks read and only this process has open for writing.
        obituary: returns the death of one of the given ranks in words; None: all of them live.
    """

    size: int
    reports: int
    gates: list[int]
    obituary: Callable[[Collection[int]], str | None]
    _text: bytes = b""
    _lost: set[int] = field(default_factory=set)

    def open_gate(self) -> float:
        """Wake all ranks; return the time just before, on the clock that all processes share."""
        began = time.monotonic()
        os.close(self.gates.pop(0))
        return began

    def close_gates(self) -> None:
        """Open all remaining gates: a living rank then runs to its end."""
        while self.gates:
            self.open_gate()

    def gather(self, deadline_s: float) -> list[Report]:
        """Return the reports of all ranks that were not killed, by rank.

        Raises:
            WorldError: a rank reports an error, dies, or does not answer before the deadline.
        """
        expected = set(range(self.size)) - self._lost
        found, deadline = self.gather_until(deadline_s)
        if missing := sorted(expected - found.keys()):
            first = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise WorldError(
                f"{len(missing)} of {self.size} ranks have not answered within "
                f"{deadline:.0f} s: {first}"
            )
        return [found[rank] for rank in sorted(found)]

    def gather_until(self, deadline_s: float) -> tuple[dict[int, Report], float]:
        """Return the reports that come before the deadline, by rank, and the time they took."""
        began = time.monotonic()
        missing = set(range(self.size)) - self._lost
        found: dict[int, Report] = {}
        checked = began
        while missing and (left := began + deadline_s - time.monotonic()) > 0:
            for report in self._read(min(left, CHECK_S)):
                if "error" in report:
                    raise WorldError(f"rank {report['rank']}: {report['error']}")
                found[report["rank"]] = report
                missing.discard(report["rank"])
            if time.monotonic() - checked > CHECK_S:
                checked = time.monotonic()
                # The report of a rank before its death is in the pipe by now.
                if (death := self.obituary(missing)) and not self._readable(0):
                    raise WorldError(death)
        return found, time.monotonic() - began

    def kill(self, rank: int, pid: int) -> float:
        """Kill a rank, from which no more reports are expected; return the time just before."""
        self._lost.add(rank)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return began

    def _read(self, timeout_s: float) -> list[Report]:
        if not self._readable(timeout_s):
            return []
        *lines, self._text = (self._text + os.read(self.reports, 1 << 16)).split(b"\n")
        return [json.loads(line) for line in lines]

    def _readable(self, timeout_s: float) -> bool:
        with signals_taken():
            return bool(select.select([self.reports], [], [], timeout_s)[0])


def sum_at_start(
    line: Line, start: Callable[[], Callable[[], Sequence[float]]], stop: Callable[[], None]
) -> None:
    """Run as a rank whose world begins at the first gate.

    Args:
        start: joins the world and sums `COUNT` elements, each this rank's number, over the ranks;
            returns a function that reads the result.
        stop: leaves the world.
    """
    line.report(pid=os.getpid())
    line.wait()
    cpu_before_s = cpu_s()
    read = start()
    line.report(ended=time.monotonic())
    line.wait()
    spent_s = cpu_s() - cpu_before_s  # with this rank's threads working for later ranks
    expected = [line.size * (line.size - 1) / 2] * COUNT
    if list(read()) != expected:
        raise ValueError(f"the allreduce has returned {list(read())[:4]}..., not {expected[0]}")
    line.report(cpu_s=spent_s)
    line.wait()
    stop()


def cpu_s() -> float:
    """Return the CPU time of this process, all its threads and the kernel for them."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def pss_mib(pid: int) -> float:
    """Return a process's memory; memory shared by n processes counts as an n-th to each."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
