# SPDX-License-Identifier: Apache-2.0
"""Frames over Unix sockets: frames received after the other end is gone."""

import socket
from collections.abc import Iterator

import pytest

from torch_ring.setup.frames import HEADER_BYTES, Frame, FrameSocket, Kind, encode
from torch_ring.setup.network import Deadline


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    one, other = socket.socketpair()
    ends = FrameSocket(one), FrameSocket(other)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("unread", [False, True])
def test_last_words_arrive(ends: tuple[FrameSocket, FrameSocket], unread: bool) -> None:
    one, other = ends
    if unread:  # then the kernel resets the connection when the other end closes it
        one.send(Kind.VALUE, Deadline(1), b"nobody reads this")
    other.send(Kind.FAILURE, Deadline(1), b"why")
    other.close()
    assert one.receive() == [Frame(Kind.FAILURE, b"why")]
    with pytest.raises((EOFError, OSError)):
        one.receive()


def test_a_reset_without_last_words_is_an_error(ends: tuple[FrameSocket, FrameSocket]) -> None:
    one, other = ends
    one.send(Kind.VALUE, Deadline(1), b"nobody reads this")
    other.close()
    with pytest.raises(ConnectionResetError):
        one.receive()


def test_a_frame_of_too_many_bytes_is_refused_by_its_header(ends):
    one, other = ends
    other.socket.send(encode(Kind.HELLO, bytes(1000))[:HEADER_BYTES])
    with pytest.raises(ValueError, match="1000 bytes and 0 descriptors is no HELLO"):
        one.receive(1.0)
