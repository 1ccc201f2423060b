"""What Horovod's elastic driver tells its workers: from whom it is taken, and in which forms."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from horovods_driver import (
    AckResponse,
    HostsUpdatedRequest,
    HostUpdateResult,
    PingRequest,
    PingResponse,
    send,
)

from torch_ring.rendezvous.horovod_notices import HorovodNotices


def test_notices_are_taken_from_the_driver_only() -> None:
    heard: list[tuple[float, int]] = []
    notices = HorovodNotices("127.0.0.1", lambda when, what: heard.append((when, what)))
    address = ("127.0.0.1", notices.port)
    try:
        answer = send(address, notices.key, PingRequest())
        assert isinstance(answer, PingResponse)
        assert vars(answer) == {
            "service_name": "worker notification service",
            "source_address": "127.0.0.1",
        }
        request = HostsUpdatedRequest(1.5, HostUpdateResult.removed)
        assert isinstance(send(address, notices.key, request), AckResponse)
        for key, message in ((b"another" * 5, request), (notices.key, threading.Lock)):
            with pytest.raises(OSError, match=r"no answer|reset"):
                send(address, key, message)
        assert heard == [(1.5, 1)]
    finally:
        notices.close()
    with pytest.raises(ConnectionRefusedError):
        send(address, notices.key, request)


class Reduced:
    """What is pickled as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def test_notices_of_every_python_are_understood() -> None:
    """Python 3.11.0 to 3.11.3 pickle a flag as a call of getattr(), and `|` of two."""
    heard: list[tuple[float, int]] = []
    notices = HorovodNotices("127.0.0.1", lambda when, what: heard.append((when, what)))
    address = ("127.0.0.1", notices.port)
    removed, added = (Reduced(getattr, HostUpdateResult, name) for name in ("removed", "added"))
    try:
        for what in (removed, added, Reduced(operator.or_, removed, added)):
            request = HostsUpdatedRequest(1.5, cast(Any, what))
            assert isinstance(send(address, notices.key, request), AckResponse)
        assert heard == [(1.5, 1), (1.5, 2), (1.5, 3)]
        for what in (
            Reduced(getattr, HostUpdateResult, "__class__"),
            Reduced(getattr, PingRequest, "__init__"),
            Reduced(operator.or_, {1: 2}, {3: 4}),
        ):
            request = HostsUpdatedRequest(1.5, cast(Any, what))
            with pytest.raises(OSError, match=r"no answer|reset"):
                send(address, notices.key, request)
        assert len(heard) == 3
    finally:
        notices.close()
