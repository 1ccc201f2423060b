# SPDX-License-Identifier: Apache-2.0
"""Starts the launcher in a process that has torch loaded, and finds leftovers of a job."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from launcher_commands import clean_environment, processes_with

from torch_ring.run.command import main

DEADLINE_S = 60  # a hang, not a slow machine
MARK = "LAUNCHED_JOB"  # a variable by which the processes of a job are known


class LaunchedJob:
    """``python -m torch_ring.run`` with arguments, without the seconds that importing torch takes.

    Args:
        arguments: the arguments of the command line.
        folder: the working folder.
        before: called in the process before the launcher.
        reads: whether to read its output; otherwise it stays in the pipe.
        variables: additional environment variables.
    """

    running: ClassVar[list[LaunchedJob]] = []  # jobs that have not been waited for

    def __init__(
        self,
        *arguments: str,
        folder: str | Path | None = None,
        before: Callable[[], object] | None = None,
        reads: bool = True,
        **variables: str,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._said: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        pipes = {name: os.pipe() for name in self._said}
        environment = clean_environment(**variables) | {MARK: self.mark}
        for name in [n for n in environment if n.startswith("HOROVOD_")]:
            del environment[name]
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                # Garbage of the parent is not the child's to free: of a store that serves, torch
                # would wake the thread through a descriptor that is closed below, and abort.
                gc.freeze()
                os.setsid()
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: as the tests end
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(pipes["stdout"][1], 1)
                os.dup2(pipes["stderr"][1], 2)
                os.closerange(3, 4096)
                sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(folder or os.getcwd())
                if before is not None:
                    before()
                code = main(arguments)
            except SystemExit as exit_:
                code = int(exit_.code or 0)
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        self.running.append(self)
        self._threads = []
        self._pipes = []
        for name, (read, write) in pipes.items():
            os.close(write)
            self._pipes.append(read)
            if reads:
                thread = threading.Thread(target=self._read, args=(name, read), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _read(self, name: str, fd: int) -> None:
        while data := os.read(fd, 1 << 16):
            self._said[name] += data
        os.close(fd)

    def close_pipes(self) -> None:
        """Stop reading; for a job whose output is not read."""
        for fd in self._pipes:
            os.close(fd)

    @property
    def stdout(self) -> str:
        return self._said["stdout"].decode()

    @property
    def stderr(self) -> str:
        return self._said["stderr"].decode()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit code of the launcher, negative for a signal."""
        fd = os.pidfd_open(self.pid)
        ready, _, _ = select.select([fd], [], [], DEADLINE_S)
        os.close(fd)
        if not ready:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.running.remove(self)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        if not ready:
            pytest.fail(f"the launcher did not end:\n{self.stdout}\n{self.stderr}")
        return os.waitstatus_to_exitcode(status)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the ranks have printed a text `count` times."""
        self._wait_until(lambda: self.stdout.count(text) >= count, text)

    def wait_for_error(self, text: str) -> None:
        """Wait for a text on standard error."""
        self._wait_until(lambda: text in self.stderr, text)

    def _wait_until(self, is_there: Callable[[], bool], text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_there():
            if time.monotonic() > deadline:
                pytest.fail(f"no {text!r} in:\n{self.stdout}\n{self.stderr}")
            time.sleep(0.01)

    def processes(self) -> dict[int, str]:
        """Return the living processes of the job, with their command lines."""
        return processes_with(f"{MARK}={self.mark}")

    def require_nothing_left(self) -> None:
        """Wait until no process of the job lives."""
        deadline = time.monotonic() + DEADLINE_S
        while left := self.processes():
            if time.monotonic() > deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                pytest.fail(f"left behind: {left}")
            time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    """End the jobs of a failed test, which may not have waited for its own."""
    yield
    for job in list(LaunchedJob.running):
        job.signal(signal.SIGKILL)
        job.wait()
        job.require_nothing_left()


def run_job(*arguments: str, **more: object) -> tuple[int, str, str]:
    """Run a job to its end, which must leave no process; return its code, output and errors."""
    job = LaunchedJob(*arguments, **more)  # type: ignore[arg-type]
    code = job.wait()
    job.require_nothing_left()
    return code, job.stdout, job.stderr


def stub_ssh(folder: Path) -> str:
    """Return a PATH with a stand-in for ssh, which runs the command here, with $SSH_HOST."""
    ssh = folder / "ssh"
    ssh.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nexport SSH_HOST="$2"\nexec sh -c "$3"\n'
    )
    ssh.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
