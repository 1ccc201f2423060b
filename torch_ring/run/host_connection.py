"""HostConnection: the pipes to the agent of a host, over ssh if that is another host."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.bootstrap import agent_command, agent_source, remote_command
from torch_ring.run.events import Ended, Event, Lost, event_of
from torch_ring.run.frames import GREETING, Frames, frame

__all__ = ["HostConnection", "Ssh"]

_READ_BYTES = 1 << 18
_BEAT_S = 15.0
_SILENCE_S = 300.0  # after which an agent on another host takes the launcher for lost
_MOST_STDERR = 4096  # bytes that are kept to explain a failure
_SSH_FAILED = 255  # ssh's exit code for failures of its own


@dataclass(frozen=True)
class Ssh:
    """How other hosts are reached.

    Attributes:
        port: None: ssh's own choice.
        identity_file: of a private key; None: ssh's own choice.
        arguments: more of them for ssh; they go before the others, so that their options count.
    """

    port: int | None = None
    identity_file: str | None = None
    arguments: tuple[str, ...] = ()

    def command(self, host: str) -> list[str]:
        """Return the command that runs an agent on a host."""
        words = ["ssh", *self.arguments, "-T", "-x", "-a"]
        # No questions, which nobody would see; and no key other than the one that was seen first.
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
    """The agent of a host, which lives as long as this object is not closed.

    Args:
        host: its name.
        ssh: how it is reached; None: it is this host.
        environment: of the agent on this host, or of ssh.
        interface: of whose address the agent tells; empty: of none.
    """

    def __init__(
        self, host: str, ssh: Ssh | None, environment: Mapping[str, str], interface: str = ""
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
        self.is_open = True  # it may still tell something
        self.has_ended = False  # it has said that its ranks have ended
        self.command = shlex.join(command[:-1] if ssh else command)
        self._waiting = bytearray(agent_source())
        self._greeting: bytearray | None = bytearray()
        self._frames = Frames()
        self._stderr = bytearray()
        self._beat_at = time.monotonic() + _BEAT_S
        self.send(
            do="hello",
            parent=os.getpid() if self.is_local else 0,
            silence_s=0.0 if self.is_local else _SILENCE_S,
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
        """Write of the requests what the pipe takes."""
        try:
            del self._waiting[: os.write(self.input, self._waiting[:_READ_BYTES])]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # its output says that it has ended
            self._waiting.clear()

    def beat(self) -> None:
        """Tell another host, from time to time, that the launcher lives."""
        now = time.monotonic()
        if not self.is_local and now >= self._beat_at and not self._waiting:
            self._beat_at = now + _BEAT_S
            self.send(do="nothing")

    def read(self) -> list[Event]:
        """Return what the agent has told."""
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
        """Return what ssh or the agent has written to standard error."""
        try:
            data = os.read(self.errors, _READ_BYTES)
        except BlockingIOError:
            return ""
        if not data:
            self._close_errors()
        self._stderr = (self._stderr + data)[-_MOST_STDERR:]
        return data.decode(errors="replace")

    def close(self) -> None:
        """End the agent, or the ssh to it, at once. The ranks end when it has ended."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self.is_open = False
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # The agent ends with its input; killed before that, it could end no rank.
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
