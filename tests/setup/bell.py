# SPDX-License-Identifier: Apache-2.0
"""a_signal_after: a signal whose handler raises, as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from pool import eventually


class Bell(BaseException):
    """The exception of the handler."""


@contextlib.contextmanager
def a_signal_after(seconds: float, once: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Make a signal's handler raise Bell in this thread, which is the main thread.

    Args:
        seconds: the delay after that.
        once: a condition that must hold first; another thread polls it.
    """

    def ring(*_: object) -> None:
        raise Bell

    def set_timer() -> None:
        if eventually(once):
            signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, ring)
    thread = threading.Thread(target=set_timer)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
