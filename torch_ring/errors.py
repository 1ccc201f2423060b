# SPDX-License-Identifier: Apache-2.0
"""RingError and the other exceptions of torch_ring; the type says what a caller can do."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable

__all__ = [
    "NOTE",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "InvalidArgumentError",
    "MismatchError",
    "NonFiniteGradientError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSetLostError",
    "RingError",
    "StateDamagedError",
    "TimeoutError",
    "add_to_texts",
    "first_line",
]


NOTE = " [the last operations of this rank "
"""The beginning of the notes of `add_to_texts`."""


class RingError(RuntimeError):
    """A collective has failed. After any but a MismatchError: shutdown() and init(), or exit.

    Its text ends with the notes of `add_to_texts`.

    Args:
        args: the text. A text that has notes already gets no more: the native module may have added
            them, or the text may quote another error.
    """

    def __init__(self, *args: object) -> None:
        text, *rest = args or ("",)
        if isinstance(text, str) and NOTE not in text and (note := note_for_error()):
            args = (text + note, *rest)
        super().__init__(*args)


HorovodInternalError = RingError
"""Horovod's name for RingError."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """The hosts of an elastic job have changed. Scripts for Horovod catch it by this name.

    Args:
        skip_sync: whether hosts have only left, so that no rank has to copy a state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class MismatchError(RingError):
    """The ranks disagree on an operation or a setting; no data was moved, the job may go on."""


class PeerLostError(RingError):
    """A rank has died, has left early, or has been silent for too long."""


class ProcessSetLostError(RingError):
    """A process set has lost a rank in an elastic job. The job may go on, with another set."""


class StateDamagedError(RingError):
    """A rank has received another state than the one that was sent."""


class TimeoutError(RingError, builtins.TimeoutError):
    """A rank is alive but did not take part before the deadline."""


class InvalidArgumentError(ValueError, RuntimeError):
    """An argument or a setting is wrong on this rank; nothing was sent.

    A ValueError as in PyTorch, and a RuntimeError as Horovod's errors of the same calls.
    """


class NotInitializedError(ValueError, RuntimeError):
    """An operation was called before ``init()`` or after ``shutdown()``."""

    def __init__(self, what: str = "torch_ring has not been initialized: call init() first"):
        super().__init__(what)


class NonFiniteGradientError(FloatingPointError, RuntimeError):
    """A rank's gradient has a NaN or an infinity; no rank has stepped, the job may go on.

    Only with ``nan_check``. It is no RingError, since shutdown() and init() would not help.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message: those of torch may have thirty lines."""
    return str(error).partition("\n")[0]


_notes: list[Callable[[], str]] = []
_noting = threading.local()


def add_to_texts(note: Callable[[], str]) -> None:
    """Append the result of `note`, which raises nothing, to the text of each RingError.

    The result is "", or begins with `NOTE`.
    """
    if note not in _notes:
        _notes.append(note)


def note_for_error() -> str:
    """Return the notes at the end of a RingError's text. The native module calls it, too."""
    if getattr(_noting, "is_under_way", False):  # an error made by a note gets no notes
        return ""
    _noting.is_under_way = True
    try:
        return "".join(note() for note in _notes)
    finally:
        _noting.is_under_way = False
