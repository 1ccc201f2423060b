# SPDX-License-Identifier: Apache-2.0
"""HostConnection: the pipes to the agent of a host, over ssh for another host."""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.agent import GREETING, FrameReader, frame

__all__ = [
    "Ended",
    "Event",
    "Exited",
    "HostConnection",
    "Lost",
    "Note",
    "Output",
    "Ready",
    "Signal",
    "Ssh",
    "Unread",
    "Unstartable",
]

# No data of a job are on the command line, which every user of a host can read.
_READ_PROGRAM = "import base64;exec(base64.b64decode(open(0,'rb',0,closefd=False).readline()))"
_FLAGS = ("-I", "-S", "-c")  # without the user's variables and packages: starts in 20 ms
_FIND_PYTHON = (
    'p=$(command -v "$1" || command -v python3 || command -v python) || '
    '{ echo "there is no $1, and no python3" >&2; exit 127; }; '
    'exec "$p" -I -S -c "$2"'
)
# In the order of their imports.
_MODULES = ("setup.control_groups", "run.numa", "run.agent")
_PROGRAM = """
import sys, types
for name, text in {modules!r}:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["torch_ring.run.agent"].main()
"""


def agent_command() -> list[str]:
    """Return the command of an agent on this host."""
    return [sys.executable, *_FLAGS, _READ_PROGRAM]


def remote_command() -> str:
    """Return the command of an agent on another host, for the shell of the user there.

    It uses this Python's path if that file exists there, or else the first python3.
    """
    words = ["sh", "-c", _FIND_PYTHON, "sh", sys.executable, _READ_PROGRAM]
    return "exec " + " ".join(map(shlex.quote, words))


def agent_source() -> bytes:
    """Return the first input of an agent: its program, in one line."""
    package = Path(__file__).parent.parent
    modules = [(name, "") for name in ("torch_ring", "torch_ring.setup", "torch_ring.run")]
    for name in _MODULES:
        text = (package / f"{name.replace('.', '/')}.py").read_text()
        modules.append((f"torch_ring.{name}", text))
    return base64.b64encode(_PROGRAM.format(modules=modules).encode()) + b"\n"


@dataclass(frozen=True)
class Ready:
    """The agent of a host runs.

    Attributes:
        port: a free port there.
        server: the address at which ssh has reached the host; empty on the launcher's own.
        interface_address: the address of the network interface chosen by the user; empty: none.
        problem: the reason why no rank can run there; empty: none.
    """

    host: str
    port: int
    server: str
    interface_address: str
    problem: str


@dataclass(frozen=True)
class Output:
    """A rank has written; `stream` is "stdout", "stderr" or "result"."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Exited:
    """The process of a rank has ended; a negative code is that of a signal."""

    rank: int
    code: int


@dataclass(frozen=True)
class Unstartable:
    """The command of a rank cannot be run; the code is that of a shell."""

    rank: int
    code: int
    text: str


@dataclass(frozen=True)
class Note:
    """A message about a host for the user."""

    host: str
    text: str


@dataclass(frozen=True)
class Ended:
    """The agent of a host has ended its ranks; `left` processes could not be ended."""

    host: str
    left: int


@dataclass(frozen=True)
class Going:
    """A host is about to go: its agent got SIGTERM, and gives its ranks the grace period."""

    host: str


@dataclass(frozen=True)
class Lost:
    """The agent of a host has died, or cannot be reached any more."""

    host: str
    reason: str


@dataclass(frozen=True)
class Signal:
    """The launcher has got a signal."""

    number: int


@dataclass(frozen=True)
class Unread:
    """The reader of the launcher's own "stdout" or "stderr" has closed it."""

    stream: str


Event = Ready | Output | Exited | Unstartable | Note | Ended | Going | Lost | Signal | Unread


def event_of(host: str, header: dict[str, Any], payload: bytes) -> Event:
    """Return the event in a frame of an agent."""
    kind = header["event"]
    if kind == "output":
        return Output(header["rank"], header["stream"], payload)
    if kind == "exited":
        return Exited(header["rank"], header["code"])
    if kind == "unstartable":
        return Unstartable(header["rank"], header["code"], header["text"])
    if kind == "note":
        return Note(host, header["text"])
    if kind == "going":
        return Going(host)
    if kind == "ended":
        return Ended(host, header["left"])
    ssh = header["ssh"].split()  # the client's address and port, the server's address and port
    server = ssh[2] if len(ssh) == 4 else ""
    problem = header.get("problem", "")
    return Ready(host, header["port"], server, header["interface_address"], problem)


_READ_BYTES = 1 << 18
_BEAT_S = 15.0
_SILENCE_S = 300.0  # silence after which an agent on another host considers the launcher dead
_MOST_STDERR = 4096  # bytes kept to explain a failure
_SSH_FAILED = 255  # ssh's exit code for failures of its own


@dataclass(frozen=True)
class Ssh:
    """The options of ssh for other hosts.

    Attributes:
        port: the port; None: ssh's own choice.
        identity_file: the file of a private key; None: ssh's own choice.
        arguments: additional arguments; they come first, so that their options take precedence.
    """

    port: int | None = None
    identity_file: str | None = None
    arguments: tuple[str, ...] = ()

    def command(self, host: str) -> list[str]:
        """Return the command that runs an agent on a host."""
        words = ["ssh", *self.arguments, "-T", "-x", "-a"]
        # No questions, since no user would see them; and no host key other than the first one seen.
        options = {"BatchMode": "yes", "StrictHostKeyChecking": "accept-new", "ControlMaster": "no"}
        options |= {"ServerAliveInterval": "15", "ServerAliveCountMax": "4"}
        options["ClearAllForwardings"] = "yes"
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        return [*words, "--", host, remote_command()]


class HostConnection:
    """The agent of a host, which lives until this object is closed.

    Args:
        host: the name of the host.
        ssh: the options of ssh; None: it is this host.
        environment: the environment of the agent on this host, or of ssh.
        grace_s: the grace period of its ranks when the agent gets SIGTERM.
        drains: whether the job is elastic: then only the ranks get the signal, and may leave by
            themselves. Otherwise all their processes get it.
        interface: the network interface whose address the agent reports; empty: none.
    """

    def __init__(
        self,
        host: str,
        ssh: Ssh | None,
        environment: Mapping[str, str],
        grace_s: float,
        *,
        drains: bool = False,
        interface: str = "",
    ) -> None:
        self.host, self.is_local = host, ssh is None
        command = agent_command() if ssh is None else ssh.command(host)
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the launcher, which passes it on
            )
        except FileNotFoundError:
            raise InvalidArgumentError(
                f"{host} is another host, and there is no {command[0]} here to reach it: install "
                "it (Debian: openssh-client)"
            ) from None
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self.input, self.output, self.errors = (pipe.fileno() if pipe else -1 for pipe in pipes)
        for fd in (self.input, self.output, self.errors):
            os.set_blocking(fd, False)
        self.is_open = True  # the agent may still send events
        self.has_ended = False  # the agent has reported the end of its ranks
        self.command = shlex.join(command[:-1] if ssh else command)
        self._waiting = bytearray(agent_source())
        self._greeting: bytearray | None = bytearray()
        self._frames = FrameReader()
        self._stderr = bytearray()
        self._beat_at = time.monotonic() + _BEAT_S
        self.send(
            do="hello",
            parent=os.getpid() if self.is_local else 0,
            silence_s=0.0 if self.is_local else _SILENCE_S,
            grace_s=grace_s,
            drains=drains,
            interface=interface,
        )

    @property
    def is_waiting(self) -> bool:
        """Whether the pipe has not yet taken all requests."""
        return bool(self._waiting)

    def send(self, payload: bytes = b"", **request: Any) -> None:
        """Send a request when the pipe takes it."""
        if self.is_open:
            self._waiting += frame(request, payload)

    def flush(self) -> None:
        """Write as much of the requests as the pipe takes."""
        try:
            del self._waiting[: os.write(self.input, self._waiting[:_READ_BYTES])]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # read() reports the end of the agent
            self._waiting.clear()

    def beat(self) -> None:
        """Tell an agent on another host, from time to time, that the launcher lives."""
        now = time.monotonic()
        if not self.is_local and now >= self._beat_at and not self._waiting:
            self._beat_at = now + _BEAT_S
            self.send(do="nothing")

    def read(self) -> list[Event]:
        """Return the new events of the agent."""
        try:
            data = os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return self._lose()
        if self._greeting is not None:
            self._greeting += data
            _noise, greeting, rest = self._greeting.partition(GREETING)
            if not greeting:
                return []
            self._greeting, data = None, bytes(rest)
        events = [event_of(self.host, *each) for each in self._frames.feed(data)]
        self.has_ended = self.has_ended or any(isinstance(event, Ended) for event in events)
        return events

    def read_errors(self) -> str:
        """Return the new text on standard error, of ssh or the agent."""
        try:
            data = os.read(self.errors, _READ_BYTES)
        except BlockingIOError:
            return ""
        if not data:
            self._close_errors()
        self._stderr = (self._stderr + data)[-_MOST_STDERR:]
        return data.decode(errors="replace")

    def close(self) -> None:
        """End the agent, or the ssh to it, at once. Its ranks end after that."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self.is_open = False
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # The agent exits at the end of its input; if killed before, it could end no rank.
                self._process.wait(0.0 if self.has_ended or not self.is_local else 8.0)
            self._process.kill()
        self._process.wait()

    def _lose(self) -> list[Event]:
        self.is_open = False
        self._waiting.clear()
        if self.errors >= 0:
            self.read_errors()
        self._close_errors()
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = 0
        if self.has_ended:
            return []
        return [Lost(self.host, self._reason(code))]

    def _close_errors(self) -> None:
        if self.errors >= 0 and self._process.stderr is not None:
            self._process.stderr.close()
        self.errors = -1

    def _reason(self, code: int) -> str:
        said = " ".join(self._stderr.decode(errors="replace").split())
        said = f": {said}" if said else ""
        if self.is_local:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"the agent that runs the ranks of this host ended {how}{said}"
        if code == _SSH_FAILED:
            return (
                f"ssh does not reach it, or has lost it{said}: does `ssh {self.host} true` work "
                "without a password?"
            )
        return (
            f"the agent there, or ssh, ended with exit code {code}{said}: does "
            f"`ssh {self.host} python3 -V` work?"
        )
