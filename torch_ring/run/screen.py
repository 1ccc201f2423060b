# SPDX-License-Identifier: Apache-2.0
"""Screen: writes the lines of many ranks to standard output, standard error and files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from torch_ring.errors import InvalidArgumentError

__all__ = ["FdSink", "Screen", "Sink", "StreamSink", "say"]

_MOST_LINE = 1 << 20  # bytes; a longer line is shown in pieces
_MOST_WAITING = 1 << 20  # unread bytes: above it, no more are taken from ranks
_PIPE_BUF = 4096  # bytes that a writable pipe takes without blocking (pipe(7))
_FILE_BYTES = 1 << 20
_LAUNCHER = -1  # in place of a rank; standby process 1 is -2, and so on


class Sink:
    """A destination of text that writes at once: nothing waits. `FdSink` does not block."""

    fd = -1  # the descriptor to poll for writing while bytes wait; -1: none

    def __init__(self) -> None:
        self.waiting = bytearray()  # bytes that have not been written

    def write(self, data: bytes) -> None:
        """Take bytes. Raises OSError if they are written at once, and that fails."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write as many waiting bytes as possible without blocking.

        Raises:
            BrokenPipeError: the reader of the pipe, connection or terminal has closed it.
            OSError: it cannot be written now, as on a full disk.
        """

    def drop(self, reason: str) -> None:
        """Drop the waiting bytes, which cannot be written. The next output begins with a notice."""

    def mute(self) -> None:
        """Drop all waiting and later bytes: there is no reader."""


class FdSink(Sink):
    """A sink that is a descriptor. It stays blocking, since other processes may share it.

    Call `flush` when the descriptor polls as writable.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd
        self._gap = b""  # a notice of missing output, to be written first
        self._is_mute = False
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._most = _FILE_BYTES if self._is_file else _PIPE_BUF

    def write(self, data: bytes) -> None:  # noqa: D102
        if not self._is_mute:
            self.waiting += data

    def flush(self) -> None:  # noqa: D102
        try:
            if self._gap:
                self._gap = self._gap[os.write(self.fd, self._gap) :]
            del self.waiting[: os.write(self.fd, self.waiting[: self._most])]
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in (errno.ECONNRESET, errno.EIO) and not self._is_file:
                raise BrokenPipeError(error.errno, error.strerror) from None
            raise

    def drop(self, reason: str) -> None:  # noqa: D102
        self.waiting.clear()
        self._gap = f"\ntorch_ring.run: output is missing here: {reason}\n".encode()

    def mute(self) -> None:  # noqa: D102
        self.waiting.clear()
        self._is_mute = True


class StreamSink(Sink):
    """A sink for `sys.stdout` or `sys.stderr`, which a notebook or a test may have replaced."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def write(self, data: bytes) -> None:
        """Write bytes; may block, as the stream does."""
        stream = getattr(sys, self._name)
        stream.write(data.decode(errors="replace"))
        stream.flush()


class Screen:
    """Assembles the ranks' output into lines, and writes each with its rank in front.

    Lines are never mixed. A carriage return, with which a progress bar restarts its line, ends a
    line, too, so the bar stays on one line as long as no other rank writes.

    Args:
        stdout, stderr: the sinks of the lines.
        size: the number of ranks.
        folder: a folder for each rank's streams without a prefix, as in `rank.3/stdout`.
        with_time: whether to put the time before each line.

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
        self.pieces = 0  # number of pieces written, each of one or more whole lines
        self.is_dropping = False  # whether to drop unread output: the job is being ended
        self._with_time = with_time
        self._begun: dict[tuple[int, str], bytearray] = {}  # unfinished lines
        self._last: dict[str, tuple[int, bool]] = {}  # sink -> rank, whether it left a bar
        self._folder = None if folder is None else Path(folder)
        self._digits = len(str(max(0, size - 1)))
        self._files: dict[tuple[int, str], tuple[BinaryIO, FdSink]] = {}
        self._kept: set[tuple[int, str]] = set()  # ranks and streams with a file of this job
        self._shown_once: set[str] = set()  # kinds of lines that are shown only once
        if self._folder is not None:
            try:
                self._folder_of(0).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidArgumentError(
                    f"--output-filename: {error}: give a folder that can be written"
                ) from None

    @property
    def is_full(self) -> bool:
        """Whether too many bytes wait for their reader to take more from the ranks."""
        return any(len(sink.waiting) >= _MOST_WAITING for sink in self.sinks.values())

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Take a rank's output; write its complete lines."""
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
        """End the unfinished lines of a rank, which has exited."""
        for stream in self.sinks:
            rest = self._begun.pop((rank, stream), None)
            if rest and rest != b"\r":
                self._write_lines(rank, stream, [rest + b"\n"])
            if (rank, stream) in self._files:
                self._files.pop((rank, stream))[0].close()

    def say(self, line: str, stream: str = "stderr") -> None:
        """Write a line of the launcher itself."""
        self._write_lines(
            _LAUNCHER, stream, [f"torch_ring.run: {line}\n".encode(errors="surrogateescape")]
        )

    def lose(self, stream: str, error: OSError) -> None:
        """Drop output that a stream cannot take, as on a full disk; report it on the other one."""
        reason = error.strerror or str(error)
        self.sinks[stream].drop(reason)
        self._tell_once(
            stream,
            f"{stream} cannot be written: {reason}. The job goes on; its output is lost until "
            "there is room",
            "stdout" if stream == "stderr" else "stderr",
        )

    def mute(self, fd: int) -> None:
        """Write no more to a descriptor without a reader."""
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
        if not lines or (
            self.is_dropping and rank != _LAUNCHER and len(sink.waiting) >= _MOST_WAITING
        ):
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
        """Write to a rank's file; if that fails, the job goes on without the file."""
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
            # A restarted rank appends to its file.
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
    """Write a line of the launcher itself to standard error at once, without ranks."""
    with contextlib.suppress(OSError):  # a full disk, or no reader
        print(f"torch_ring.run: {line}", file=sys.stderr, flush=True)


def _label(rank: int) -> str:
    return str(rank) if rank >= 0 else f"standby {_LAUNCHER - rank}"
