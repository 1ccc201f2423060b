"""Discovery: asks the user's script, again and again, which hosts there are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

from torch_ring.errors import InvalidArgumentError, RingError, first_line
from torch_ring.run.hosts import Host, parse_host_lines

__all__ = ["Discovery", "find_hosts"]

_EVERY_S = 1.0
_ANSWER_S = 30.0  # a script that asks a cloud's service may need some


def find_hosts(script: str, slots: int, environment: Mapping[str, str]) -> list[Host]:
    """Return the hosts that a script prints. Blocks until it ends, for 30 s at most.

    Args:
        script: a command for the shell.
        slots: of a host for which the script gives no number.
        environment: of the script.

    Raises:
        RingError: it has failed, or did not end in time, and was ended.
        InvalidArgumentError: it prints something else.
    """
    process = subprocess.Popen(
        ["sh", "-c", script],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise RingError(
            f"{script!r} did not end within {_ANSWER_S:g} s: let it print the hosts of now"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # also what it has left behind
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
    if process.returncode:
        why = f": {errors.strip()}" if errors.strip() else ""
        raise RingError(f"{script!r} failed with exit code {process.returncode}{why}")
    try:
        return parse_host_lines(said, slots)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{script!r} has printed {error}") from None


class Discovery:
    """Runs a script every second, in a thread, and keeps its last answer.

    Thread: any. Blocking: the constructor, which runs the script.

    Args:
        find: runs the script; see `find_hosts`.

    Raises:
        RingError, InvalidArgumentError: the script fails at once.
    """

    def __init__(self, find: Callable[[], list[Host]]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._hosts: Sequence[Host] = find()
        self._problem = ""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="torch_ring hosts", daemon=True)

    @property
    def hosts(self) -> Sequence[Host]:
        """The hosts of the last answer."""
        with self._lock:
            return self._hosts

    @property
    def problem(self) -> str:
        """Why the script has failed the last time; empty: it has not."""
        with self._lock:
            return self._problem

    def start(self) -> None:
        """Ask every second from now on."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._is_closed.set()

    def _ask(self) -> None:
        while not self._is_closed.wait(_EVERY_S):
            hosts, problem = self.hosts, ""
            try:
                hosts = self._find()
            except (RingError, InvalidArgumentError, OSError) as error:
                problem = first_line(error)
            with self._lock:
                self._hosts, self._problem = hosts, problem
