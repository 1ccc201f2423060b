"""before: signals that this process handles, and the handlers that processes forked from it get."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

__all__ = ["before"]

before: dict[signal.Signals, Any] = {}  # signal -> the handler that it had before


class _Fork(threading.local):
    """Signals wait while this thread forks.

    Python forgets a signal that reaches the child before `in_child` has run.
    """

    mask: set[int | signal.Signals] | None = None

    def in_parent_before(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, before) if before else None

    def after(self) -> None:
        if self.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def in_child(self) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()
        self.after()


_fork = _Fork()
os.register_at_fork(
    before=_fork.in_parent_before, after_in_parent=_fork.after, after_in_child=_fork.in_child
)
