# SPDX-License-Identifier: Apache-2.0
"""Worlds of ranks that a program wakes all at once: forked from it, or started by mpirun.

They share a folder with the program. Through its pipe `reports` each rank sends JSON, an object a
line. A gate is a pipe that nobody has opened for writing: a rank that opens it waits until the
program opens it, too. The kernel kills the ranks when their program ends for any reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from namespaces import HERE, Host

COUNT = 256  # elements of the first allreduce: 1 KiB of float32
GATES = 3
READY_S = 120.0  # until all ranks have been started and are ready
LEAVE_S = 60.0  # until all ranks have left, before they are killed
LOOK_S = 0.2  # without a report, before a look for ranks that have died
PREFIX = f"waiting_ranks-{os.getpid()}-"  # of folders
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # linux/prctl.h

Report = dict[str, Any]


class WorldError(Exception):
    """A rank has failed, has died or has not answered in time; the text is its reason."""


class Line:
    """The rank's end. The rank alone may use it."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self._gates = (folder / f"gate{i}" for i in range(GATES))

    @functools.cached_property
    def _reports(self) -> int:
        return os.open(self.folder / "reports", os.O_WRONLY)

    def report(self, **facts: Any) -> None:
        """Send a line, short enough to be written in one piece."""
        short = {k: fact[:500] if isinstance(fact, str) else fact for k, fact in facts.items()}
        line = json.dumps({"rank": self.rank, **short}).encode() + b"\n"
        assert len(line) <= select.PIPE_BUF
        os.write(self._reports, line)

    def wait(self) -> None:
        """Wait until the program opens the next gate."""
        os.close(os.open(next(self._gates), os.O_RDONLY))


class Ranks:
    """The program's end."""

    def __init__(
        self, size: int, folder: Path, died: Callable[[Collection[int]], str | None]
    ) -> None:
        """Make the pipes in a new folder.

        Args:
            died: returns the death of one of some ranks in words; None: all of them live.
        """
        self._size, self._died, self._text = size, died, b""
        self._lost: set[int] = set()
        for name in ("reports", *(f"gate{i}" for i in range(GATES))):
            os.mkfifo(folder / name)
        self._gates = [folder / f"gate{i}" for i in range(GATES)]
        self._open = [os.open(folder / "reports", os.O_RDWR)]

    def open_gate(self) -> float:
        """Wake all ranks; return the time just before, on the clock that all processes share."""
        began = time.monotonic()
        self._open.append(os.open(self._gates.pop(0), os.O_RDWR))
        return began

    def open_all(self) -> None:
        """Open all remaining gates: a living rank then runs to its end."""
        while self._gates:
            self.open_gate()

    def close(self) -> None:
        for end in self._open:
            os.close(end)

    def gather(self, deadline_s: float) -> list[Report]:
        """Return the reports of all ranks that were not killed, by rank.

        Raises:
            WorldError: a rank reports an error, dies, or does not answer before the deadline.
        """
        missing = set(range(self._size)) - self._lost
        found: dict[int, Report] = {}
        deadline = time.monotonic() + deadline_s
        while missing:
            if time.monotonic() > deadline:
                first = ", ".join(map(str, sorted(missing)[:8])) + ", ..." * (len(missing) > 8)
                of_all = f"{len(missing)} of {self._size} ranks have not answered"
                raise WorldError(f"{of_all} within {deadline_s:.0f} s: {first}")
            reports = self._read()
            for report in reports:
                if "error" in report:
                    raise WorldError(f"rank {report['rank']}: {report['error']}")
                found[report["rank"]] = report
                missing.discard(report["rank"])
            if not reports and (reason := self._died(missing)):
                raise WorldError(reason)
        return [found[rank] for rank in sorted(found)]

    def kill(self, rank: int, pid: int) -> float:
        """Kill a rank, from which no more reports are expected; return the time just before."""
        self._lost.add(rank)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return began

    def _read(self) -> list[Report]:
        if not select.select([self._open[0]], [], [], LOOK_S)[0]:
            return []
        *lines, self._text = (self._text + os.read(self._open[0], 1 << 16)).split(b"\n")
        return [json.loads(line) for line in lines]


@contextmanager
def forked(
    size: int,
    body: Callable[[Line], None],
    environment: Callable[[int], Mapping[str, str]],
    hosts: Sequence[Host] = (HERE,),
) -> Iterator[Ranks]:
    """Fork ranks that run `body`; when the context ends, open the last gates, and end them all.

    A thread does not survive a fork, but a lock that it holds does: this process must have none.

    Args:
        environment: returns a rank's variables, as a launcher would set them.
        hosts: namespaces with equally many ranks.
    """
    if len(threads := os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"a process with {len(threads)} threads must not fork ranks")
    gc.freeze()  # otherwise a collection in a child would write to, and so copy, every object
    pids: dict[int, int] = {}

    def died(ranks: Collection[int]) -> str | None:
        for rank in pids.keys() & ranks:
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                del pids[rank]
                code = os.waitstatus_to_exitcode(status)
                how = f"ended with {code}" if code >= 0 else f"died: {signal.Signals(-code).name}"
                return f"rank {rank} {how}: {tail(folder / 'output')}"
        return None

    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
        ranks = Ranks(size, folder, died)
        cleanup.callback(ranks.close)
        cleanup.callback(kill, pids)
        parent = os.getpid()
        for rank in range(size):
            host = hosts[rank * len(hosts) // size]
            variables = environment(rank)  # here: its error is the program's
            with signals_held():
                pids[rank] = os.fork()
                if pids[rank] == 0:
                    be_rank(Line(folder, rank, size), body, variables, host, parent)
        yield ranks
        ranks.open_all()
        deadline = time.monotonic() + LEAVE_S
        while pids and time.monotonic() < deadline:
            if died(pids) is None:
                time.sleep(0.01)
        if pids:
            print(f"# {len(pids)} of {size} ranks had to be killed", file=sys.stderr, flush=True)


@contextmanager
def signals_held() -> Iterator[None]:
    """Context of a fork: its hooks would lose the exception of a signal's handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def kill(pids: dict[int, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    for pid in pids.values():
        os.waitpid(pid, 0)


def be_rank(
    line: Line,
    body: Callable[[Line], None],
    environment: Mapping[str, str],
    host: Host,
    parent: int,
) -> NoReturn:
    """Run as a rank, and never return to the code that has forked it."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with(parent)
        output = os.open(line.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        host.enter()
        os.environ.update(environment)
        body(line)
        code = 0
    except BaseException as error:
        line.report(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    finally:
        os._exit(code)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends for any reason; take signals again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tail(output: Path) -> str:
    """Return the end of the last line that the ranks have printed."""
    lines = output.read_text(errors="replace").strip().splitlines() if output.exists() else []
    return lines[-1][-300:] if lines else "nothing is printed"


# --- Open MPI, whose ranks only mpirun can start


def find_mpirun() -> str | None:
    """Return the mpirun of this Python's environment, or else of PATH."""
    beside = Path(sys.executable).parent
    return shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")


def why_no_mpi() -> str | None:
    """Return the missing requirement of ranks of Open MPI, if any."""
    mpirun = find_mpirun()
    if mpirun is None:
        return "there is no mpirun"
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout:
        return "mpirun is not Open MPI's"
    check = [sys.executable, "-c", "import mpi4py"]
    done = subprocess.run(check, capture_output=True, check=False)
    return "there is no mpi4py" if done.returncode else None


@contextmanager
def started_by_mpirun(size: int) -> Iterator[Ranks]:
    """Start ranks that sum at the first gate; when the context ends, end them all."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = [*root, "--oversubscribe", "--bind-to", "none", "-np", str(size)]
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
        # MPI's files are removed with the folder, even after a crash; shared memory is no disk.
        memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
        shared = cleanup.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=memory))
        theirs = {"TMPDIR": str(folder), "OMPI_MCA_btl_sm_backing_directory": shared}

        def died(_: object) -> str | None:
            if process.poll() is None:
                return None
            return f"mpirun has ended with {process.returncode}: {tail(folder / 'output')}"

        ranks = Ranks(size, folder, died)
        cleanup.callback(ranks.close)
        with signals_held():
            process = subprocess.Popen(
                [str(find_mpirun()), *options, sys.executable, __file__, str(folder)],
                env=os.environ | theirs,
                stdin=subprocess.DEVNULL,
                stdout=cleanup.enter_context((folder / "output").open("w")),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this program
                preexec_fn=functools.partial(die_with, os.getpid()),
            )
            cleanup.callback(end, process)
        yield ranks
        ranks.open_all()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)


def end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun, if it runs, and give it time to end its ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def sum_at_start(
    line: Line, start: Callable[[], Sequence[float]], stop: Callable[[], object]
) -> None:
    """Run as a rank whose world begins at the first gate, and ends at the second.

    Args:
        start: joins the world and sums `COUNT` elements, each this rank's number, over the ranks.
        stop: leaves the world.
    """
    line.report(pid=os.getpid())
    line.wait()
    total = start()
    line.report(ended=time.monotonic())
    line.wait()
    expected = [line.size * (line.size - 1) / 2] * COUNT
    if list(total) != expected:
        raise ValueError(f"the allreduce has returned {list(total)[:4]}..., not {expected[0]}")
    line.report()
    stop()


def be_rank_of_mpi(folder: Path) -> None:
    die_with(os.getppid())
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    line = Line(folder, rank, size)

    def start() -> Sequence[float]:
        MPI.Init()
        own, total = array("f", [rank] * COUNT), array("f", [0] * COUNT)
        MPI.COMM_WORLD.Allreduce(own, total, MPI.SUM)
        return total

    try:
        sum_at_start(line, start, MPI.Finalize)
    except Exception as error:
        line.report(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    be_rank_of_mpi(Path(sys.argv[1]))
