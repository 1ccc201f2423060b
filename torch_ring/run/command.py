# SPDX-License-Identifier: Apache-2.0
"""main: the command ``python -m torch_ring.run``, or ``torch_ring_run``."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.native import is_for_one_rank
from torch_ring.run.agent import why_unstartable
from torch_ring.run.job import exit_code
from torch_ring.run.launch import environment_alone, launch
from torch_ring.run.options import Options, parse_options
from torch_ring.run.screen import FdSink, say
from torch_ring.setup.launchers import slurm_job, without_launchers

__all__ = ["main", "version"]


def version() -> str:
    """Return torch_ring's version."""
    return str(sys.modules["torch_ring"].__version__)  # imported already, with this package


def build_report() -> str:
    """Return a report whose lines are those of ``horovodrun --check-build``."""
    built = importlib.import_module("torch_ring.mpi_ops")  # it needs torch
    parts = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Available Controllers": {"MPI": built.mpi_built(), "Gloo": built.gloo_built()},
        "Available Tensor Operations": {
            "NCCL": bool(built.nccl_built()),
            "DDL": built.ddl_built(),
            "CCL": built.ccl_built(),
            "MPI": built.mpi_built(),
            "Gloo": built.gloo_built(),
        },
    }
    lines = [f"torch_ring v{version()}:"]
    for title, features in parts.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in features.items()]
    lines += [
        "",
        'By "Gloo" scripts for Horovod mean transports without MPI: shared memory and TCP.',
        "`python -m torch_ring` tries them.",
    ]
    return "\n".join(lines)


_REFUSED = 2  # argparse's exit code
_FAILED = 1
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job; return its exit code.

    The code is 0; or that of the first rank that has failed; or 128 plus the number of the signal
    that has ended it or the job; or 1 if a host was not reached; or 2 if the command line is wrong.
    """
    prog = "torch_ring_run"
    if sys.argv and sys.argv[0].endswith("__main__.py"):
        prog = "python -m torch_ring.run"
    environment = without_launchers()
    try:
        options = parse_options(arguments, prog)
        if options.shows:
            print(version() if options.shows == "version" else build_report())
            return 0
        if not options.command:
            raise InvalidArgumentError(
                "there is no command to run: give one, as in `python train.py`"
            )
        if is_for_one_rank():
            return _run_alone(options, environment)
        slurm_job = _slurm_job() if options.requeue else ""
        code, job = launch(options, environment, (FdSink(1), FdSink(2)), signals=_signals)
        if slurm_job and job.has_stopped:
            _requeue(slurm_job)
        return code
    except InvalidArgumentError as error:
        say(str(error))
        return _REFUSED
    except (RingError, OSError) as error:
        say(str(error))
        return _FAILED
    except KeyboardInterrupt:  # there are no ranks yet: later, signals are passed on to them
        return exit_code(-signal.SIGINT)


def _run_alone(options: Options, environment: Mapping[str, str]) -> int:
    """Run the command as a world of one rank, where there is nothing else."""
    variables = environment_alone(options, environment, "the launcher")
    try:
        process = subprocess.Popen(options.command, env=variables)
    except (OSError, ValueError) as error:  # ValueError: a null character
        code, text = why_unstartable(options.command[0], error)
        say(f"rank 0 on localhost {text}")
        return code
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # the command gets Ctrl-C, too
            return exit_code(process.wait())


def _slurm_job() -> str:
    """Return the number of the Slurm job in which this process runs."""
    number = slurm_job()
    if not number:
        raise InvalidArgumentError("--requeue needs a job of Slurm: there is no SLURM_JOB_ID")
    if shutil.which("scontrol") is None:
        raise InvalidArgumentError("--requeue needs Slurm's scontrol on the PATH")
    return number


def _requeue(slurm_job: str) -> None:
    """Have Slurm requeue its job, which ends this process if the job's script still runs."""
    say(f"the ranks have stopped: job {slurm_job} of Slurm is put into its queue again")
    ended = subprocess.run(["scontrol", "requeue", slurm_job], check=False)
    if ended.returncode:
        raise RingError(f"`scontrol requeue {slurm_job}` has failed: see above; the job ends")


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Context that handles signals: yields a descriptor from which their numbers can be read."""
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)

    def note(number: int, _frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writer, bytes([number]))

    before = {}
    for number in (signal.Signals[name] for name in _PASSED_ON):
        # nohup ignores SIGHUP, and a shell ignores SIGINT for background processes.
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
