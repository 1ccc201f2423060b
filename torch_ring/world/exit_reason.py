# SPDX-License-Identifier: Apache-2.0
"""reason_to_leave, reason_at_exit: this process's reason to leave its world, for other ranks."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from typing import Any

__all__ = ["reason_at_exit", "reason_to_leave", "watch_exit"]

_LONGEST = 600  # characters; a control message takes four times as many bytes
_LIBRARIES = (
    *{sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib")},
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<frozen ",
)

_seen: BaseException | None = None  # sys.last_value before this process joined
_by_sys_exit = ""  # the reason of the last sys.exit() of the main thread


def watch_exit() -> None:
    """Record a later exit code: Python itself keeps no record of ``sys.exit(3)``."""
    global _seen, _by_sys_exit
    _seen, _by_sys_exit = _last_uncaught(), ""
    if getattr(sys.exit, "of_torch_ring", False):
        return
    leave = sys.exit

    def exit(status: Any = None, /) -> None:  # its own name: tracebacks show it
        global _by_sys_exit
        if threading.current_thread() is threading.main_thread():
            _by_sys_exit = _of_status(status, sys.exc_info()[1])
        leave(status)

    exit.of_torch_ring = True  # type: ignore[attr-defined]
    exit.__doc__ = leave.__doc__
    sys.exit = exit  # type: ignore[assignment]


def reason_to_leave() -> str:
    """Return the exception being handled, "ValueError: ... at train.py:41"; "" for none.

    The text has its type and message, and the last line in its traceback, preferably of the program
    rather than of a library.
    """
    error = sys.exc_info()[1]
    return "" if error is None else _of(error)


def reason_at_exit() -> str:
    """Return the exception or the exit code that ends the interpreter; "" for none."""
    error = sys.exc_info()[1] or _last_uncaught()
    if error is None or error is _seen:
        return _by_sys_exit
    return _of(error)


def _last_uncaught() -> BaseException | None:
    """Return the exception that ends the program, not an earlier one of an interactive prompt."""
    if hasattr(sys, "ps1"):
        return None
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return _of_status(error.code, error.__context__)
    try:
        message = " ".join(str(error).split())
    except Exception:  # a broken __str__
        message = ""
    if len(message) > _LONGEST:
        message = message[:_LONGEST] + "..."
    name = type(error).__qualname__
    return (f"{name}: {message}" if message else name) + _last_line(error)


def _of_status(status: Any, cause: BaseException | None) -> str:
    """Return the reason of a SystemExit. `cause`: the exception that was being handled."""
    if status is None or status == 0:
        return ""
    code = f"exit code {status}" if isinstance(status, int) else f"exit: {str(status)[:_LONGEST]}"
    return code if cause is None else f"{code} after {_of(cause)}"


def _last_line(error: BaseException) -> str:
    """Return " at train.py:41"; "" without a traceback."""
    lines = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [(file, line) for file, line in lines if not file.startswith(_LIBRARIES)]
    if not lines:
        return ""
    file, line = (own or lines)[-1]
    return f" at {os.path.basename(file)}:{line}"
