# SPDX-License-Identifier: Apache-2.0
"""Signal handlers that communicate or shut down while their thread waits for a collective."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, eventually, has_asked
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.world.engine import interrupt_deferred


@contextlib.contextmanager
def alarm_once_it_waits() -> Iterator[None]:
    """Send SIGALRM to this thread while it waits for an operation."""
    waiting = threading.get_ident()

    def ring() -> None:
        if eventually(has_asked):
            signal.pthread_kill(waiting, signal.SIGALRM)

    thread = threading.Thread(target=ring)
    thread.start()
    yield
    thread.join()


@on_both_transports
@on_ranks(3)
def test_a_signal_handler_may_communicate(transport) -> None:
    """A signal handler runs while its thread waits for a collective."""
    rank, size = hvd.rank(), hvd.size()
    seen: list[list[float]] = []

    def handler(*_: object) -> None:
        seen.append(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="handler").tolist())
        if rank == 0:
            seen.append(hvd.broadcast_object([1.0], 0, name="again"))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        if rank != 0:
            handler()
            hvd.broadcast_object(None, 0, name="again")
        with alarm_once_it_waits() if rank == 0 else contextlib.nullcontext():
            assert hvd.allreduce(torch.ones(3), name="main").tolist() == [1.0] * 3
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [[float(size)] * 2] + [[1.0]] * (rank == 0)


@on_both_transports
@on_ranks(2)
def test_a_signal_handler_may_shut_down(transport) -> None:
    if hvd.rank() == 0:
        before = signal.signal(signal.SIGALRM, lambda *_: hvd.shutdown())
        with alarm_once_it_waits():
            kind, text = error_of(lambda: hvd.allreduce(torch.ones(2)))
        signal.signal(signal.SIGALRM, before)
        assert (kind, "shut down" in text) == ("RingError", True), text
        assert not hvd.is_initialized()
    else:
        kind, text = error_of(lambda: hvd.allreduce(torch.ones(2), name="other"))
        assert (kind, "rank 0" in text) == ("PeerLostError", True), text
        hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.parametrize("waits", [False, True])
def test_an_exception_while_handlers_are_given_back_swallows_no_other_signal(waits, monkeypatch):
    """Ctrl-C comes when its handler is restored, and SIGTERM's is not yet."""
    give_back = signal.signal
    came: list[int] = []

    def block() -> None:
        with interrupt_deferred():
            if waits:
                signal.raise_signal(signal.SIGTERM)
            assert came == []  # it waits for the end of the block

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def interrupted(number: int, handler: Any) -> Any:
        given = give_back(number, handler)
        if handler is signal.default_int_handler:
            raise KeyboardInterrupt
        return given

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
        monkeypatch.setattr(signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            block()
        assert came == [signal.SIGTERM] * waits
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM] * (waits + 1)
    finally:
        monkeypatch.undo()
        for each, handler in before.items():
            signal.signal(each, handler)
