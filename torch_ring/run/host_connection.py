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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.agent import GREETING, FrameReader, frame
from torch_ring.run.hosts import is_this_host
from torch_ring.run.job_settings import JobSpec
from torch_ring.run.options import Options

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
class AgentEvent:
    """An event that the agent of a host has sent: a frame of its fields, and the payload."""

    host: str
    data: bytes


@dataclass(frozen=True)
class Ready(AgentEvent):
    """The agent of a host runs.

    Attributes:
        port: a free port there.
        interface_address: the address of the network interface chosen by the user; empty: none.
        ssh: ssh's variable SSH_CONNECTION.
        problem: the reason why no rank can run there; empty: none.
    """

    port: int
    interface_address: str
    ssh: str
    problem: str = ""

    @property
    def server(self) -> str:
        """The address at which ssh has reached the host; empty on the launcher's own."""
        words = self.ssh.split()  # the client's address and port, the server's address and port
        return words[2] if len(words) == 4 else ""


@dataclass(frozen=True)
class Output(AgentEvent):
    """A rank has written; `stream` is "stdout", "stderr" or "result"."""

    rank: int
    stream: str


@dataclass(frozen=True)
class Exited(AgentEvent):
    """The process of a rank has ended; a negative code is that of a signal."""

    rank: int
    code: int


@dataclass(frozen=True)
class Unstartable(AgentEvent):
    """The command of a rank cannot be run; the code is that of a shell."""

    rank: int
    code: int
    text: str


@dataclass(frozen=True)
class Note(AgentEvent):
    """A message about a host for the user."""

    text: str


@dataclass(frozen=True)
class Ended(AgentEvent):
    """The agent of a host has ended its ranks; `left` processes could not be ended."""

    left: int


@dataclass(frozen=True)
class Going(AgentEvent):
    """A host is about to go: its agent got SIGTERM, and gives its ranks the grace period."""


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


Event = AgentEvent | Lost | Signal | Unread
_OF_AGENTS = {
    each.__name__.lower(): each for each in (Ready, Output, Exited, Unstartable, Note, Ended, Going)
}


_READ_BYTES = 1 << 18
_BEAT_S = 15.0
_SILENCE_S = 300.0  # silence after which an agent on another host considers the launcher dead
_MOST_STDERR = 4096  # bytes kept to explain a failure
_SSH_FAILED = 255  # ssh's exit code for failures of its own


def ssh_command(options: Options, host: str) -> list[str]:
    """Return the command that runs an agent on another host."""
    # The user's arguments come first, so that their options take precedence.
    words = ["ssh", *shlex.split(options.ssh_args), "-T", "-x", "-a"]
    # No questions, since no user would see them; and no host key other than the first one seen.
    settings = {"BatchMode": "yes", "StrictHostKeyChecking": "accept-new", "ControlMaster": "no"}
    settings |= {"ServerAliveInterval": "15", "ServerAliveCountMax": "4"}
    settings["ClearAllForwardings"] = "yes"
    for name, value in settings.items():
        words += ["-o", f"{name}={value}"]
    if options.ssh_port is not None:
        words += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file is not None:
        words += ["-i", options.ssh_identity_file]
    return [*words, "--", host, remote_command()]


class HostConnection:
    """The agent of a host, which lives until this object is closed.

    Args:
        host: the name of the host.
        spec: the job.

    Raises:
        InvalidArgumentError: there is no ssh here.
    """

    def __init__(self, host: str, spec: JobSpec) -> None:
        self.host, self.is_local = host, is_this_host(host)
        command = agent_command() if self.is_local else ssh_command(spec.options, host)
        # The environment of the agent on this host is also that of its ranks.
        environment = {n: text for n, text in spec.environment.items() if n not in spec.unset}
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
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
        self.command = shlex.join(command if self.is_local else command[:-1])
        self._waiting = bytearray(agent_source())
        self._greeting: bytearray | None = bytearray()
        self._frames = FrameReader()
        self._stderr = bytearray()
        self._beat_at = time.monotonic() + _BEAT_S
        self.send(
            do="hello",
            parent=os.getpid() if self.is_local else 0,
            silence_s=0.0 if self.is_local else _SILENCE_S,
            grace_s=spec.grace_s,  # for its ranks when it gets SIGTERM
            # In an elastic job only the ranks get the signal, and may leave by themselves.
            drains=spec.options.least is not None,
            interface=spec.options.network_interface.partition(",")[0],
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
        events: list[Event] = []
        for header, payload in self._frames.feed(data):
            kind: type[AgentEvent] = _OF_AGENTS[header.pop("event")]
            self.has_ended = self.has_ended or kind is Ended
            events.append(kind(self.host, payload, **header))
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
