# SPDX-License-Identifier: Apache-2.0
"""The agent of a host: starts ranks there, passes on their output, and leaves none behind.

The launcher sends the text of this file to a Python on every host, so it uses only the standard
library and the modules of torch_ring that are sent with it. One thread does the work: a loop around
poll().

Requests come in frames over standard input, events leave in frames over standard output. The end of
standard input means that the launcher has died: the agent then ends its ranks, and exits. Every
process that a rank has started is ended with the ranks. It remains a descendant of the agent, which
is the subreaper, even if it has left the rank's session and its parent has exited.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time

from torch_ring.run.numa import BindingError, bind, cpus_of
from torch_ring.setup.control_groups import usable_cpus

if sys.platform != "win32":
    import fcntl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

__all__ = ["GREETING", "FrameReader", "frame", "main", "why_unstartable"]

GREETING = b"\0torch_ring agent\n"  # frames begin after it: a shell may print text before

_LENGTHS = struct.Struct("!II")  # bytes of a frame's header (JSON) and of its payload


def frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return the bytes of a frame with a header and a payload."""
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Take bytes; yield the header and the payload of each complete frame."""
        self._bytes += data
        while len(self._bytes) >= _LENGTHS.size:
            text, payload = _LENGTHS.unpack_from(self._bytes)
            end = _LENGTHS.size + text + payload
            if len(self._bytes) < end:
                return
            whole = bytes(self._bytes[:end])
            del self._bytes[:end]
            yield json.loads(whole[_LENGTHS.size : end - payload]), whole[end - payload :]


_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc: Any = ctypes.CDLL(None) if sys.platform != "win32" else None


class RankProcess:
    """The process of a rank, in a session of its own, and our ends of its pipes.

    A standby process waits for more input, which makes it a rank.
    """

    def __init__(self, request: dict[str, Any], given: bytes) -> None:
        self.rank = int(request["rank"])
        self.outputs: dict[int, str] = {}  # descriptor -> name of the stream
        self.input, self._given = -1, given
        self.is_standby = bool(request["is_standby"])  # it still waits to become a rank
        environment = {**os.environ, **request["environment"]}
        cpus = None if self.is_standby else _cpus_of(request)
        cores = int(min(usable_cpus() / int(request["local_size"]), len(cpus or ()) or math.inf))
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
                preexec_fn=functools.partial(_begin, cpus),  # safe: the agent has one thread
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
        """Whether the process has still to get input, or the end of its input."""
        return self.input >= 0 and (bool(self._given) or not self.is_standby)

    def activate(self, request: dict[str, Any], given: bytes) -> None:
        """Make a standby process a rank. Raises BindingError."""
        if (cpus := _cpus_of(request)) is not None:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
                bind(self.pid, cpus)
        self.rank, self.is_standby = int(request["rank"]), False
        self._given += given

    def feed(self) -> None:
        """Write as much of the input as the pipe takes."""
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
        """Return the available output; at its end, close our end of the pipe."""
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


def _cpus_of(request: dict[str, Any]) -> set[int] | None:
    """Return the CPUs to bind a rank to; None: it is not bound. Raises BindingError."""
    mode = request["numa_binding"]
    if not mode:
        return None
    numbers = int(request["local_rank"]), int(request["local_size"])
    try:
        return cpus_of(mode, *numbers, os.sched_getaffinity(0))
    except BindingError as error:
        raise BindingError(f"cannot bind it to CPUs (--numa-binding {mode}): {error}") from None


def _begin(cpus: set[int] | None) -> None:
    """Prepare a rank before its program starts: it must not outlive the agent."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_MOST_WAITING = 1 << 20  # bytes of waiting events: above it, the ranks' output stays in their pipes
_LAST_READS = 64  # from a rank that has ended: more than its pipe holds
_LOST_GRACE_S = 5.0  # from SIGTERM to SIGKILL, when the launcher has died
_KILL_PATIENCE_S = 10.0  # for the kernel to end processes after SIGKILL
_LOOK_S = 0.1  # between checks for remaining processes, while ranks are ended
_PORTS = (10_000, 29_999)  # below the kernel's ephemeral ports
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # exit codes, as in a shell


def why_unstartable(command: str, error: Exception) -> tuple[int, str]:
    """Return the exit code and the text of a rank whose command cannot be started."""
    is_missing = isinstance(error, FileNotFoundError)
    hint = "is it installed there, and on the PATH?" if is_missing else "is it a program?"
    if command.endswith(".py"):
        hint = f"a Python program begins with its interpreter: `python {command}`"
    code = _NOT_FOUND if is_missing else _NOT_EXECUTABLE
    return code, f"cannot start {command!r}: {error}: {hint}"


class Agent:
    """Executes the launcher's requests until all ranks have ended."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankProcess] = {}  # by process id
        self._ended: list[RankProcess] = []  # ended ranks, whose descendants may still write
        self._requests = FrameReader()
        self._waiting = bytearray(GREETING)
        self._has_launcher = True
        self._parent = 0  # not 0: the launcher, a process of this host
        self._grace_s, self._drains = _LOST_GRACE_S, False
        self._end_at: float | None = None  # not None: the host goes; the ranks leave by then
        self._silence_s = 0.0  # after so long a silence the launcher counts as dead; 0: never
        self._heard = time.monotonic()
        self._kill_at: float | None = None  # not None: the ranks are being ended
        self._wakes, wake = os.pipe()
        for fd in (0, 1, self._wakes, wake):
            os.set_blocking(fd, False)
        # Handlers rather than SIG_IGN, which the ranks would inherit.
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Popen restores it
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Return when the launcher has ended the job, or has died, and no rank is left."""
        # A rank with threads that are still ending is no longer a descendant, and not yet reaped.
        while self._kill_at is None or self._ranks or self._descendants():
            self._turn()
            now = time.monotonic()
            if self._has_launcher and 0 < self._silence_s < now - self._heard:
                self._lose_launcher()
            if self._end_at is not None and (now >= self._end_at or not self._living()):
                self._end(0.0)
            if self._kill_at is not None and now >= self._kill_at:
                self._signal(self._descendants(), signal.SIGKILL)
                if now >= self._kill_at + _KILL_PATIENCE_S:
                    break  # the launcher reports that processes are left
        self._reap()
        self._send({"event": "ended", "left": len(self._descendants())})
        deadline = time.monotonic() + _KILL_PATIENCE_S
        while self._waiting and self._has_launcher and time.monotonic() < deadline:
            self._turn()

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        if self._has_launcher:
            poll.register(0, select.POLLIN)
            if self._waiting:
                poll.register(1, select.POLLOUT)
        outputs: dict[int, RankProcess] = {}
        for rank in (*self._ranks.values(), *self._ended):
            if len(self._waiting) < _MOST_WAITING:
                outputs |= dict.fromkeys(rank.outputs, rank)
            if rank.is_fed:
                poll.register(rank.input, select.POLLOUT)
                outputs[rank.input] = rank
        for fd, rank in outputs.items():
            if fd != rank.input:
                poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(1000 * self._patience_s())]
        for fd in ready:
            if fd == 0:
                self._receive()
            elif fd == 1:
                self._flush()
            elif fd in outputs:
                rank = outputs[fd]
                if fd == rank.input:
                    rank.feed()
                else:
                    self._pass_on(rank, fd)
        if self._wakes in ready:
            self._wake()

    def _patience_s(self) -> float:
        if self._kill_at is not None or self._end_at is not None:
            return _LOOK_S
        return max(_LOOK_S, self._silence_s / 4) if self._silence_s else 3600.0

    # --- the launcher

    def _send(self, event: dict[str, Any], payload: bytes = b"") -> None:
        if self._has_launcher:
            self._waiting += frame(event, payload)

    def _flush(self) -> None:
        try:
            del self._waiting[: os.write(1, self._waiting[:_READ_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self._lose_launcher()

    def _receive(self) -> None:
        try:
            data = os.read(0, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_launcher()
            return
        self._heard = time.monotonic()
        for request, payload in self._requests.feed(data):
            self._do(request, payload)

    def _lose_launcher(self) -> None:
        self._has_launcher = False
        self._waiting.clear()
        if self._end_at is None:
            self._end(_LOST_GRACE_S)

    def _do(self, request: dict[str, Any], payload: bytes) -> None:
        kind = request["do"]
        if kind == "hello":
            self._hello(request)
        elif kind == "start":
            self._start(request, payload)
        elif kind == "activate":
            self._activate(request, payload)
        elif kind == "signal":
            self._signal(self._ranks, request["signal"], whole_groups=True)
        elif kind == "end":
            self._end(request["grace_s"])

    def _hello(self, request: dict[str, Any]) -> None:
        self._silence_s, self._parent = request["silence_s"], request["parent"]
        self._grace_s, self._drains = request["grace_s"], request["drains"]
        if self._parent:  # a forked process may hold the other end of our input
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != self._parent:
                self._lose_launcher()
                return
        facts: dict[str, Any] = {"event": "ready", "port": _free_port(), "interface_address": ""}
        facts["ssh"] = os.environ.get("SSH_CONNECTION", "")
        if request["interface"]:
            try:
                facts["interface_address"] = _address_of(request["interface"])
            except OSError:
                names = ", ".join(name for _, name in socket.if_nameindex())
                facts["problem"] = (
                    f"no network interface {request['interface']!r} with an IPv4 address here "
                    f"(there are {names})"
                )
        self._send(facts)

    # --- ranks

    def _start(self, request: dict[str, Any], given: bytes) -> None:
        if self._kill_at is not None or self._end_at is not None:
            return
        folder = request["folder"]
        if not os.path.isdir(folder):
            request["folder"] = os.path.expanduser("~")
            text = f"there is no folder {folder!r} here: rank {request['rank']} starts at home"
            self._send({"event": "note", "text": text})
        try:
            rank = RankProcess(request, given)
        except BindingError as error:
            self._refuse(request, str(error))
            return
        except (OSError, ValueError) as error:  # ValueError: a null character
            code, text = why_unstartable(request["command"][0], error)
            self._refuse(request, text, code)
            return
        self._ranks[rank.pid] = rank

    def _activate(self, request: dict[str, Any], given: bytes) -> None:
        """Make a standby process a rank; this fails if the process has ended."""
        for rank in self._ranks.values():
            if rank.rank == request["standby"] and rank.is_standby:
                try:
                    rank.activate(request, given)
                except BindingError as error:
                    self._refuse(request, str(error))
                return
        self._refuse(request, "its standby process has ended")

    def _refuse(self, request: dict[str, Any], text: str, code: int = 1) -> None:
        self._send({"event": "unstartable", "rank": request["rank"], "code": code, "text": text})

    def _pass_on(self, rank: RankProcess, fd: int) -> bool:
        name = rank.outputs[fd]
        data = rank.read(fd)
        if data:
            self._send({"event": "output", "rank": rank.rank, "stream": name}, data)
        return bool(data)

    def _wake(self) -> None:
        numbers = os.read(self._wakes, _READ_BYTES)
        if signal.SIGTERM in numbers:
            if self._parent and os.getppid() != self._parent:
                self._lose_launcher()
            else:
                self._go()
        self._reap()

    def _go(self) -> None:
        """Pass a SIGTERM of the system on to the ranks, which have the grace period to leave."""
        if not self._drains:
            self._end(self._grace_s)
        elif self._end_at is None and self._kill_at is None:
            self._send({"event": "going"})
            self._signal(self._living(), signal.SIGTERM)  # not their workers: still in use
            self._end_at = time.monotonic() + self._grace_s

    def _living(self) -> list[int]:
        return [pid for pid, process in self._ranks.items() if not process.is_standby]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._ranks:
                self._leave(self._ranks.pop(pid), status)

    def _leave(self, rank: RankProcess, status: int) -> None:
        """Pass on the last output of a rank, and then its exit code."""
        for fd in list(rank.outputs):
            reads = 0
            while fd in rank.outputs and reads < _LAST_READS and self._pass_on(rank, fd):
                reads += 1
        if rank.input >= 0:
            os.close(rank.input)
            rank.input = -1
        if rank.outputs:
            self._ended.append(rank)
        self._send({"event": "exited", "rank": rank.rank, "code": rank.ended(status)})

    def _end(self, grace_s: float) -> None:
        """End the ranks and their descendants: SIGTERM now, SIGKILL after the grace period."""
        kill_at, self._end_at = time.monotonic() + grace_s, None
        if self._kill_at is None:
            for number in (signal.SIGTERM, signal.SIGCONT):
                self._signal(self._descendants(), number)
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)

    def _signal(self, pids: Iterable[int], number: int, whole_groups: bool = False) -> None:
        for pid in list(pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # setuid programs
                (os.killpg if whole_groups else os.kill)(pid, number)

    def _descendants(self) -> list[int]:
        """Return all descendants of this process that have not ended."""
        parents: dict[int, int] = {}
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
                    if state not in (b"Z", b"X"):
                        parents[int(name)] = int(parent)
        children: dict[int, list[int]] = {}
        for pid, parent_pid in parents.items():
            children.setdefault(parent_pid, []).append(pid)
        found: list[int] = []
        new = [os.getpid()]
        while new:
            new = [child for pid in new for child in children.get(pid, [])]
            found += new
        return found


def _free_port() -> int:
    for _ in range(100):
        port = random.randint(*_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    return 0


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def main() -> None:
    """Run as the agent of this host."""
    Agent().run()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
