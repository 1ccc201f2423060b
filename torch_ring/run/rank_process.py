"""RankProcess: the process of a rank on this host, and this side of its pipes.

The text of this file is sent to every host: it uses the standard library only, and of torch_ring
what is sent with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess

from torch_ring.rendezvous.control_groups import usable_cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["RankProcess"]

_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None)


class RankProcess:
    """The process of a rank, in a session of its own, and our ends of its pipes.

    A standby process waits for more input, with which it becomes a rank.
    """

    def __init__(self, request: dict[str, Any], given: bytes) -> None:
        self.rank = int(request["rank"])
        self.outputs: dict[int, str] = {}  # descriptor -> name of the stream
        self.input, self._given = -1, given
        self.is_standby = bool(request["is_standby"])  # it still waits to become a rank
        environment = {**os.environ, **request["environment"]}
        cores = int(usable_cpus() / int(request["local_size"]))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
        command = list(request["command"])
        passed: list[int] = []
        if request["has_result"]:
            read, write = os.pipe()
            self.outputs[read] = "result"
            passed.append(write)
            command.append(str(write))
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=request["folder"],
                stdin=subprocess.PIPE if given else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=passed,
                preexec_fn=_end_with_parent,  # there is one thread
            )
        except BaseException:
            self.close()
            raise
        finally:
            for fd in passed:
                os.close(fd)
        for pipe, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr")):
            assert pipe is not None
            self.outputs[os.dup(pipe.fileno())] = name
            pipe.close()
        for fd in self.outputs:
            os.set_blocking(fd, False)
        if self._process.stdin is not None:
            self.input = os.dup(self._process.stdin.fileno())
            self._process.stdin.close()
            os.set_blocking(self.input, False)
        self.pid = self._process.pid

    @property
    def is_fed(self) -> bool:
        """Whether the process is to read more, or the end of its input."""
        return self.input >= 0 and (bool(self._given) or not self.is_standby)

    def activate(self, rank: int, given: bytes) -> None:
        """Let a standby process become a rank."""
        self.rank, self.is_standby = rank, False
        self._given += given

    def feed(self) -> None:
        """Write of the input what the pipe takes."""
        try:
            self._given = self._given[os.write(self.input, self._given[:_WRITE_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._given, self.is_standby = b"", False
        if not self._given and not self.is_standby:
            os.close(self.input)
            self.input = -1

    def read(self, fd: int) -> bytes:
        """Return what has been written; at its end close our end of the pipe."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            os.close(fd)
            del self.outputs[fd]
        return data

    def ended(self, status: int) -> int:
        """Return the exit code, negative for a signal."""
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._process.returncode

    def close(self) -> None:
        """Close this side of the pipes."""
        for fd in (*self.outputs, self.input):
            if fd >= 0:
                os.close(fd)
        self.outputs.clear()
        self.input = -1


def _end_with_parent() -> None:
    """In a rank, before its program: never outlive the agent, which would end it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
