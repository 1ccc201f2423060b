"""JOBS: a rank of a job is killed under a launcher; the times of steps before and after."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from start_line import WorldError

HERE = Path(__file__).parent
PROGRAM = [str(HERE / "recovery_program.py"), "--folder"]
DEADLINE_S = 120.0  # of each wait
CALM_S = 2.0  # of training before the kill, and after all ranks are there again
STANDBY = "standby of torch_ring.run"  # on the command line of such a process
LOOK_S = 0.02

RUN = ["-m", "torch_ring.run", "-np", "4", "--min-np", "1", "--max-np", "4"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


@dataclass(frozen=True)
class Job:
    """The command of a job.

    Attributes:
        launcher: the arguments after `python`.
        program: whether `python` stands before the name of the program, too.
        has_standby: whether the launcher keeps a standby process.
    """

    launcher: list[str]
    program: list[str]
    has_standby: bool = False


JOBS = {
    "torch_ring, standby": Job([*RUN, "--standby", "1"], [sys.executable], has_standby=True),
    "torch_ring": Job(RUN, [sys.executable]),
    "torchrun": Job([*TORCHRUN, "--max-restarts", "1"], []),
}


@dataclass(frozen=True)
class JobRow:
    """One killed rank of a job of four.

    Attributes:
        again_s: the time from the kill to the first step of the survivors, or of their successors.
        whole_s: the time from the kill to the first step of four ranks.
        steps_s: the ends of the steps of rank 0, in seconds after the kill.
    """

    launcher: str
    victim: int
    again_s: float
    whole_s: float
    steps_s: list[float]


def killed(name: str, victim: int) -> JobRow:
    """Run a job, kill a rank of it, and return the measurement.

    Raises:
        WorldError: the job ended, or did not go on in time.
    """
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as text, started(job, Path(text)) as process:
        folder = Path(text)

        def wait(is_so: Callable[[], bool], what: str) -> None:
            deadline = time.monotonic() + DEADLINE_S
            while not is_so():
                if process.poll() is not None:
                    raise WorldError(f"{name}: the job has ended: {tail(folder / 'output')}")
                if time.monotonic() > deadline:
                    raise WorldError(f"{name}: no {what} within {DEADLINE_S:.0f} s")
                time.sleep(LOOK_S)

        wait(lambda: ranks_of_four(folder, 0.0) == {0, 1, 2, 3}, "training of four ranks")
        if job.has_standby:
            wait(lambda: is_ready(folder), "standby process that is ready")
        time.sleep(CALM_S)
        pid = next(pid for pid, lines in read(folder).items() if lines[-1][3] == victim)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait(lambda: ranks_of_four(folder, killed_at + 0.01) == {0, 1, 2, 3}, "four ranks again")
        time.sleep(CALM_S)
        (folder / "stop").touch()
        process.wait(DEADLINE_S)
        return row_of(name, victim, read(folder), killed_at)


Lines = list[tuple[float, int, int, int]]
"""The time of a step's end, the number of ranks, the step's number, the rank."""


def read(folder: Path) -> dict[int, Lines]:
    """Return the lines that the processes have written, by pid."""
    found: dict[int, Lines] = {}
    for path in folder.glob("steps-*"):
        *whole, _ = path.read_text().split("\n")
        lines = [line.split() for line in whole]
        numbers: Lines = [(float(t), int(n), int(step), int(r)) for t, n, step, r in lines]
        if numbers:
            found[int(path.name.partition("-")[2])] = numbers
    return found


def ranks_of_four(folder: Path, since: float) -> set[int]:
    """Return the ranks that have ended a step among four after a moment."""
    return {
        rank
        for lines in read(folder).values()
        for ended, size, _, rank in lines
        if size == 4 and ended > since
    }


def row_of(name: str, victim: int, lines: dict[int, Lines], killed_at: float) -> JobRow:
    """Return the times of the job's recovery: of the survivors, or else of their successors.

    Under torchrun the survivors go on, too, until it ends them: these steps do not count.
    """
    come = {pid: of for pid, of in lines.items() if of[0][0] > killed_at}
    whole = max(of[0][0] for of in come.values())
    fewer = [
        [ended for ended, size, *_ in of if ended > killed_at and size < 4]
        for pid, of in lines.items()
        if pid not in come and of[-1][0] > whole
    ]
    first = [ends[0] for ends in fewer if ends]
    of_rank_0 = sorted(e for of in lines.values() for e, _, _, rank in of if rank == 0)
    return JobRow(
        name,
        victim,
        max(first, default=whole) - killed_at,
        whole - killed_at,
        [round(ended - killed_at, 4) for ended in of_rank_0 if ended > killed_at - CALM_S],
    )


@contextmanager
def started(job: Job, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job in a session of its own; end it and all its ranks afterwards."""
    command = [sys.executable, *job.launcher, *job.program, *PROGRAM, str(folder)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_RING_LOG_LEVEL": "error"}
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # the launchers end their ranks then
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_ready(folder: Path) -> bool:
    """Return whether the standby process of the job has imported torch, and is idle."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_text(errors="replace")
            if STANDBY not in command or str(folder) not in command:
                continue
            if "libtorch_python" not in (process / "maps").read_text():
                continue
            before = cpu_ticks(process)
            time.sleep(CALM_S)
            return cpu_ticks(process) == before
    return False


def cpu_ticks(process: Path) -> int:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime: man 5 proc


def tail(output: Path) -> str:
    """Return the last line that a job has printed."""
    lines = output.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it has printed nothing"
