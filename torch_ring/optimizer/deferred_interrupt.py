"""interrupt_deferred: holds Ctrl-C back until the ranks have finished what they do together."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["interrupt_deferred"]


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Context at whose end the program's handler of SIGINT is called, if the signal came.

    A second signal does not wait. Elsewhere than in the main thread, where Python handles signals,
    and without a handler of Python's, the context does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):
        yield
        return
    deferred: list[tuple[int, FrameType | None]] = []

    def defer(number: int, frame: FrameType | None) -> None:
        deferred.append((number, frame))
        if len(deferred) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(deferred) == 1:
            handler(*deferred.pop())
