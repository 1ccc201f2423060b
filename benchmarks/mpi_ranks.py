"""started_by_mpirun(): starts ranks of Open MPI, which only mpirun can; and each rank's program.

The ranks talk to this program over named pipes in a folder of their own, as forked ones over pipes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from start_line import (
    COUNT,
    GATES,
    SIGNALS,
    Line,
    Ranks,
    die_with_parent,
    signals_taken,
    sum_at_start,
)

LEAVE_S = 60.0  # until mpirun has ended, before it is killed
KILL_S = 5.0  # until it has ended its ranks
PREFIX = f"mpi_ranks{os.getpid()}-"  # of folders


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
    mpirun = find_mpirun()
    assert mpirun is not None
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = [*root, "--oversubscribe", "--bind-to", "none", "-np", str(size)]
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
        reports, *gates = (named_pipe(path) for path in pipes_in(folder))
        cleanup.callback(os.close, reports)
        # MPI's files are removed with the folder, even after a crash; shared memory is no disk.
        memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
        shared = cleanup.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=memory))
        theirs = {"TMPDIR": str(folder), "OMPI_MCA_btl_sm_backing_directory": shared}
        command = [mpirun, *options, sys.executable, __file__, str(folder)]
        output = cleanup.enter_context((folder / "output").open("w+"))
        process = subprocess.Popen(
            command,
            env=os.environ | theirs,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this program
            preexec_fn=take_signals,
        )
        cleanup.callback(end, process)

        def obituary(_: object) -> str | None:
            if process.poll() is None:
                return None
            lines = (folder / "output").read_text(errors="replace").split("\n")
            told = [line.strip(" -") for line in lines if line.strip(" -")]
            return f"mpirun has ended with {process.returncode}: {' '.join(told)[:300]}"

        ranks = Ranks(size, reports, gates, obituary)
        cleanup.callback(ranks.close_gates)
        yield ranks
        ranks.close_gates()
        deadline = time.monotonic() + LEAVE_S
        while process.poll() is None and time.monotonic() < deadline:
            with signals_taken():
                time.sleep(0.01)


def take_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def pipes_in(folder: Path) -> list[Path]:
    return [folder / name for name in ("reports", *(f"gate{i}" for i in range(GATES)))]


def named_pipe(path: Path) -> int:
    """Make a named pipe and open both its ends, so that no open() blocks."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def end(process: subprocess.Popen[Any]) -> None:
    """End mpirun, if it runs, and give it time to end its ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- a rank


def main(folder: Path) -> None:
    die_with_parent(os.getppid())
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    reports, *gates = pipes_in(folder)
    # Without waiting: the program that has made the pipes may have ended.
    to_program = os.open(reports, os.O_WRONLY | os.O_NONBLOCK)
    line = Line(
        rank, size, to_program, [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in gates]
    )
    for end_of_pipe in (to_program, *line.gates):
        os.set_blocking(end_of_pipe, True)

    def start() -> Callable[[], Sequence[float]]:
        MPI.Init()
        own, total = array("f", [rank] * COUNT), array("f", [0] * COUNT)
        MPI.COMM_WORLD.Allreduce(own, total, MPI.SUM)
        return lambda: total

    try:
        sum_at_start(line, start, MPI.Finalize)
    except Exception as error:
        line.report(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
