# SPDX-License-Identifier: Apache-2.0
"""Lines of many ranks on one screen."""

from __future__ import annotations

import os

import pytest

from torch_ring.run.agent import FrameReader, frame
from torch_ring.run.screen import FdSink, Screen, Sink


class Kept(Sink):
    """A sink that keeps its bytes."""

    data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.fixture
def out() -> Kept:
    return Kept()


@pytest.fixture
def screen(out: Kept) -> Screen:
    return Screen(out, Kept(), 12)


def test_lines_are_put_together(screen, out):
    screen.write(0, "stdout", b"one\ntw")
    screen.write(1, "stdout", b"other\n")
    screen.write(0, "stdout", b"o\n\nthree")
    assert out.data == b"[0]<stdout>:one\n[1]<stdout>:other\n[0]<stdout>:two\n[0]<stdout>:\n"
    screen.finish(1)
    assert b"three" not in out.data
    screen.finish(0)
    assert out.data.endswith(b"[0]<stdout>:three\n")


def test_bytes_are_kept_as_they_are_and_streams_apart(screen, out):
    screen.write(3, "stderr", b"bad\n")
    for byte in b"\xff\x00\xe2\x82\xac\n":
        screen.write(0, "stdout", bytes([byte]))
    assert out.data == b"[0]<stdout>:\xff\x00\xe2\x82\xac\n"
    assert screen.sinks["stderr"].data == b"[3]<stderr>:bad\n"


def test_a_progress_bar_is_one_line_until_somebody_else_writes(screen, out):
    for percent in (1, 2, 3):
        screen.write(0, "stdout", b"\r%d%%" % percent)
    assert out.data == b"[0]<stdout>:1%\r[0]<stdout>:2%\r"
    screen.write(1, "stdout", b"hello\n")
    assert out.data.endswith(b"2%\r\n[1]<stdout>:hello\n")
    screen.write(0, "stdout", b"\r100%\n")
    assert out.data.endswith(b"hello\n[0]<stdout>:3%\r[0]<stdout>:100%\n")


def test_line_ends_of_windows_that_come_in_two_parts(screen, out):
    screen.write(0, "stdout", b"a\r")
    screen.write(0, "stdout", b"\nb\r\n")
    assert out.data == b"[0]<stdout>:a\r\n[0]<stdout>:b\r\n"


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_line_without_an_end_is_shown_in_pieces_and_that_is_said_once(out, tmp_path, is_kept):
    screen = Screen(out, Kept(), 12, str(tmp_path) if is_kept else None)
    for _ in range(40):
        screen.write(0, "stdout", b"x" * (1 << 16))
    lines = out.data.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(b"[0]<stdout>:x") for line in lines)
    said = screen.sinks["stderr"].data.decode()
    cure = "" if is_kept else ": --output-filename keeps it whole"
    assert said == f"torch_ring.run: a line of rank 0 is shown in pieces of 1 MiB{cure}\n"
    if is_kept:
        assert (tmp_path / "rank.00" / "stdout").read_bytes() == b"x" * (40 << 16)


def test_a_rank_that_is_started_again_adds_to_its_files(out, tmp_path):
    screen = Screen(out, Kept(), 2, str(tmp_path))
    for text in (b"first\n", b"second\n"):
        screen.write(1, "stderr", text)
        screen.finish(1)
    assert (tmp_path / "rank.1" / "stderr").read_bytes() == b"first\nsecond\n"
    screen = Screen(out, Kept(), 2, str(tmp_path))  # another job
    screen.write(1, "stderr", b"new\n")
    assert (tmp_path / "rank.1" / "stderr").read_bytes() == b"new\n"


def test_a_gap_is_marked_where_output_was_lost(tmp_path):
    """A disk that is full for a while."""
    fd = os.open("/dev/full", os.O_WRONLY)
    sink = FdSink(fd)
    sink.write(b"lost\n")
    with pytest.raises(OSError, match="No space left"):
        sink.flush()
    sink.drop("No space left on device")
    assert not sink.waiting
    with (tmp_path / "file").open("wb") as file:
        os.dup2(file.fileno(), fd)
    sink.write(b"shown\n")
    while sink.waiting:
        sink.flush()
    sink.write(b"more\n")
    sink.flush()
    os.close(fd)
    assert (tmp_path / "file").read_text() == (
        "\ntorch_ring.run: output is missing here: No space left on device\nshown\nmore\n"
    )


@pytest.mark.parametrize("step", [1, 3, 4096, 1 << 20])
def test_frames_come_in_any_pieces(step):
    sent = [({"a": 1}, b""), ({"b": "\udc80"}, b"\0" * 9_000), ({}, b"end")]
    data = b"".join(frame(*each) for each in sent)
    frames = FrameReader()
    pieces = [data[begin : begin + step] for begin in range(0, len(data), step)]
    assert [each for piece in pieces for each in frames.feed(piece)] == sent
