"""a_signal_after: a signal whose handler raises, as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Bell(BaseException):
    """The exception of the handler."""


@contextlib.contextmanager
def a_signal_after(seconds: float) -> Iterator[None]:
    """Let a signal's handler raise Bell in this thread, which is the process's first."""

    def ring(*_: object) -> None:
        raise Bell

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
