"""Screen: lines of many ranks on one standard output, one standard error, and in files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from torch_ring.errors import InvalidArgumentError

__all__ = ["FdSink", "Screen", "Sink", "StreamSink", "say"]

_MOST_LINE = 1 << 20  # bytes; a longer line is shown in pieces
_MOST_WAITING = 1 << 20  # bytes that wait for their reader before more are taken from ranks
_PIPE_BUF = 4096  # what a pipe that polls as writable takes without blocking (pipe(7))
_FILE_BYTES = 1 << 20
_LAUNCHER = -1  # in place of a rank; standby process 1 is -2, and so on


class Sink(Protocol):
    """Where text goes. Nothing of it blocks."""

    @property
    def fd(self) -> int:
        """The descriptor to poll until it can be written to, while bytes wait; -1: none."""

    @property
    def waiting(self) -> int:
        """Bytes that have not been written."""

    def write(self, data: bytes) -> None:
        """Take bytes. Raises OSError if they are written at once, and that fails."""

    def flush(self) -> None:
        """Write what can be written at once.

        Raises:
            BrokenPipeError: nobody reads it.
            OSError: it cannot be written now.
        """

    def drop(self, reason: str) -> None:
        """Forget the bytes that wait: they cannot be written. The next line says so first."""

    def mute(self) -> None:
        """Forget what waits and what comes."""


class FdSink:
    """A sink that is a descriptor, which other processes may share: it stays a blocking one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._bytes = bytearray()
        self._gap = b""  # tells that output is missing, before what is written next
        self._is_mute = False
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._most = _FILE_BYTES if self._is_file else _PIPE_BUF

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self._fd

    @property
    def waiting(self) -> int:
        """Bytes that have not been written."""
        return len(self._bytes)

    def write(self, data: bytes) -> None:
        """Take bytes."""
        if not self._is_mute:
            self._bytes += data

    def flush(self) -> None:
        """Write some of the bytes: call it when the descriptor polls as writable.

        Raises:
            BrokenPipeError: nobody reads it: a pipe, a connection or a terminal.
            OSError: it cannot be written now, as on a full disk.
        """
        try:
            if self._gap:
                self._gap = self._gap[os.write(self._fd, self._gap) :]
            del self._bytes[: os.write(self._fd, self._bytes[: self._most])]
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in (errno.ECONNRESET, errno.EIO) and not self._is_file:
                raise BrokenPipeError(error.errno, error.strerror) from None
            raise

    def drop(self, reason: str) -> None:
        """Forget the bytes that wait: they cannot be written. The next line says so first."""
        self._bytes.clear()
        self._gap = f"\ntorch_ring.run: output is missing here: {reason}\n".encode()

    def mute(self) -> None:
        """Forget what waits and what comes: nobody reads it."""
        self._bytes.clear()
        self._is_mute = True


class StreamSink:
    """A sink that is `sys.stdout` or `sys.stderr`, as a notebook or a test has replaced it."""

    fd, waiting = -1, 0

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, data: bytes) -> None:
        """Write bytes; blocks as the stream does."""
        stream = getattr(sys, self._name)
        stream.write(data.decode(errors="replace"))
        stream.flush()

    def flush(self) -> None:
        """Return: nothing waits."""

    def drop(self, reason: str) -> None:
        """Return: nothing waits."""

    def mute(self) -> None:
        """Return: a stream of Python tells its user itself."""


class Screen:
    """Puts lines together from what the ranks write, and writes each with its rank in front.

    A line is never mixed with another one. A carriage return, with which a progress bar begins its
    line anew, ends a line, too; so that the bar stays one line as long as nobody else writes.

    Args:
        stdout, stderr: where lines go.
        size: the number of ranks.
        folder: where each rank's streams are kept without a prefix, as in `rank.3/stdout`.
        with_time: whether the time goes before each line.

    Raises:
        InvalidArgumentError: the folder cannot be made.
    """

    def __init__(
        self,
        stdout: Sink,
        stderr: Sink,
        size: int,
        folder: str | None = None,
        with_time: bool = False,
    ) -> None:
        self.sinks = {"stdout": stdout, "stderr": stderr}
        self.pieces = 0  # that have been written: whole lines, one or more
        self.is_dropping = False  # of what nobody reads in time: the job is being ended
        self._with_time = with_time
        self._begun: dict[tuple[int, str], bytearray] = {}  # lines without an end
        self._last: dict[str, tuple[int, bool]] = {}  # sink -> rank, whether it left a bar
        self._folder = None if folder is None else Path(folder)
        self._digits = len(str(max(0, size - 1)))
        self._files: dict[tuple[int, str], tuple[BinaryIO, FdSink]] = {}
        self._kept: set[tuple[int, str]] = set()  # whose files were begun in this job
        self._shown_once: set[str] = set()  # what was said and is not said again
        if self._folder is not None:
            try:
                self._folder_of(0).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidArgumentError(
                    f"--output-filename: {error}: give a folder that can be written"
                ) from None

    @property
    def is_full(self) -> bool:
        """Whether so much waits for its reader that no more should be taken from the ranks."""
        return any(sink.waiting >= _MOST_WAITING for sink in self.sinks.values())

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Take what a rank has written; write the lines that are whole."""
        if self._folder is not None:
            self._keep(rank, stream, data)
        begun = self._begun.setdefault((rank, stream), bytearray())
        begun += data
        lines = begun.splitlines(keepends=True)
        rest = bytearray()
        if lines and not lines[-1].endswith(b"\n"):  # "\r" at the end may be half of "\r\n"
            rest = lines.pop()
            if len(rest) >= _MOST_LINE:
                cure = "" if self._folder is not None else ": --output-filename keeps it whole"
                self._tell_once(
                    "pieces", f"a line of rank {rank} is shown in pieces of 1 MiB{cure}"
                )
                lines.append(rest + b"\n")
                rest = bytearray()
        self._begun[rank, stream] = rest
        self._write_lines(rank, stream, [line for line in lines if line != b"\r"])

    def finish(self, rank: int) -> None:
        """End the lines that a rank has begun: it has ended."""
        for stream in self.sinks:
            rest = self._begun.pop((rank, stream), None)
            if rest and rest != b"\r":
                self._write_lines(rank, stream, [rest + b"\n"])
            if (rank, stream) in self._files:
                self._files.pop((rank, stream))[0].close()

    def say(self, line: str, stream: str = "stderr") -> None:
        """Write a line of the launcher itself, to standard error unless that cannot be written."""
        self._write_lines(
            _LAUNCHER, stream, [f"torch_ring.run: {line}\n".encode(errors="surrogateescape")]
        )

    def lose(self, stream: str, error: OSError) -> None:
        """Drop what a stream does not take now, as on a full disk; say so on the other one."""
        reason = error.strerror or str(error)
        self.sinks[stream].drop(reason)
        self._tell_once(
            stream,
            f"{stream} cannot be written: {reason}. The job goes on; its output is lost until "
            "there is room",
            "stdout" if stream == "stderr" else "stderr",
        )

    def mute(self, fd: int) -> None:
        """Write no more to a descriptor that nobody reads."""
        for sink in self.sinks.values():
            if sink.fd == fd:
                sink.mute()

    def close(self) -> None:
        """Close the files."""
        for file, _ in self._files.values():
            file.close()
        self._files.clear()

    def _write_lines(self, rank: int, stream: str, lines: Sequence[bytes | bytearray]) -> None:
        sink = self.sinks[stream]
        if not lines or (self.is_dropping and rank != _LAUNCHER and sink.waiting >= _MOST_WAITING):
            return
        prefix = b"" if rank == _LAUNCHER else self._prefix(rank, stream)
        written = bytearray()
        last, left_bar = self._last.get(stream, (rank, False))
        if left_bar and last != rank:
            written += b"\n"
        for line in lines:
            written += prefix + line
        self.pieces += 1
        self._last[stream] = (rank, lines[-1].endswith(b"\r"))
        try:
            sink.write(bytes(written))
        except BrokenPipeError:
            raise
        except OSError as error:
            self.lose(stream, error)

    def _tell_once(self, kind: str, line: str, stream: str = "stderr") -> None:
        if kind not in self._shown_once:
            self._shown_once.add(kind)
            self.say(line, stream)

    def _prefix(self, rank: int, stream: str) -> bytes:
        when = time.strftime("%a %b %e %H:%M:%S %Y") if self._with_time else ""
        return f"{when}[{_label(rank)}]<{stream}>:".encode()

    def _keep(self, rank: int, stream: str, data: bytes) -> None:
        """Write to a rank's file; while that cannot be done, the job goes on without it."""
        sink = None
        try:
            sink = self._file(rank, stream)
            sink.write(data)
            while sink.waiting:
                sink.flush()
        except OSError as error:
            path = self._folder_of(rank) / stream
            reason = error.strerror or str(error)
            if sink is not None:
                sink.drop(reason)
            self._tell_once(
                "files",
                f"{path} cannot be written: {reason}. The job goes on; files of --output-filename "
                "lack output until there is room",
            )

    def _file(self, rank: int, stream: str) -> FdSink:
        key = (rank, stream)
        if key not in self._files:
            folder = self._folder_of(rank)
            folder.mkdir(parents=True, exist_ok=True)
            # A rank that was started again adds to what there is.
            mode: Literal["ab", "wb"] = "ab" if key in self._kept else "wb"
            file = open(folder / stream, mode, buffering=0)  # noqa: SIM115
            self._kept.add(key)
            self._files[key] = file, FdSink(file.fileno())
        return self._files[key][1]

    def _folder_of(self, rank: int) -> Path:
        assert self._folder is not None
        name = f"rank.{rank:0{self._digits}d}" if rank >= 0 else _label(rank).replace(" ", ".")
        return self._folder / name


def say(line: str) -> None:
    """Write a line of the launcher itself to standard error at once: there are no ranks."""
    with contextlib.suppress(OSError):  # a full disk, or nobody reads it
        print(f"torch_ring.run: {line}", file=sys.stderr, flush=True)


def _label(rank: int) -> str:
    return str(rank) if rank >= 0 else f"standby {_LAUNCHER - rank}"
