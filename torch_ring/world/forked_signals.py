# SPDX-License-Identifier: Apache-2.0
"""handle, give_back: signal handlers that forked children do not inherit."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch_ring.setup.network import at_fork

__all__ = ["give_back", "handle"]

_Handler = Callable[[int, FrameType | None], None]

_handled: dict[signal.Signals, tuple[_Handler, Any]] = {}  # with the previous handler


def handle(number: signal.Signals, handler: _Handler) -> None:
    """Handle a signal in this process alone. ValueError: this is not the main thread."""
    present = signal.getsignal(number) or signal.SIG_DFL  # None: no Python handler
    ours, before = _handled.get(number, (None, present))
    signal.signal(number, handler)
    _handled[number] = handler, before if present == ours else present


def give_back(number: signal.Signals, handler: _Handler) -> None:
    """Restore a signal's previous handler, unless it has another handler by now."""
    ours, before = _handled.get(number, (None, None))
    if ours != handler:
        return
    if signal.getsignal(number) == handler:
        signal.signal(number, before)
    del _handled[number]


class _Fork(threading.local):
    """Blocks signals while this thread forks.

    Otherwise Python would lose a signal that reaches the child before `in_child` has run.
    """

    mask: set[int | signal.Signals] | None = None

    def in_parent_before(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled) if _handled else None

    def after(self) -> None:
        if self.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def in_child(self) -> None:
        for number, (handler, _) in list(_handled.items()):
            give_back(number, handler)
        self.after()


_fork = _Fork()
at_fork(before=_fork.in_parent_before, after_in_parent=_fork.after, after_in_child=_fork.in_child)
