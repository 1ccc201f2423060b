"""number, byte_count, ...: readers of the values of settings.

A reader takes the text of a variable, and returns its value. Errors: ValueError says what the value
must be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

__all__ = [
    "LEVELS",
    "byte_count",
    "count",
    "disables_stall_check",
    "file_path",
    "horovod_level",
    "number",
    "one_of",
    "switch",
    "timeline_path",
]

LEVELS = ("debug", "info", "warning", "error")
MOST = 1e8  # seconds: the longest time that the engine can count


def number(minimum: float, factor: float = 1.0, most: float = MOST) -> Callable[[str], float]:
    """Return a reader of numbers from `minimum` to `most`, which it multiplies by `factor`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = float(text)
            if minimum <= value <= most:
                return value * factor
        raise ValueError(f"must be a number from {minimum:g} to {most:g}")

    return parse


def byte_count(minimum: int) -> Callable[[str], int]:
    """Return a reader of whole numbers of bytes from `minimum` on."""

    def parse(text: str) -> int:
        if text.isdecimal() and minimum <= int(text) < 1 << 62:
            return int(text)
        raise ValueError(f"must be a whole number of bytes, {minimum} or more")

    return parse


def count(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        raise ValueError(f"must be a whole number from {least} to {most}")

    return parse


def one_of(*allowed: str) -> Callable[[str], str]:
    """Return a reader of words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text.lower()

    return parse


def switch(text: str) -> bool:
    """Read 0, 1, false or true."""
    return one_of("0", "1", "false", "true")(text) in ("1", "true")


def file_path(text: str) -> str:
    """Read the path of a file, which need not be there."""
    if text.endswith("/"):
        raise ValueError("must be the path of a file, not of a folder")
    return text


def horovod_level(text: str) -> str:
    """Read a level of Horovod's log."""
    level = {"trace": "debug", "fatal": "error"}.get(text.lower(), text.lower())
    return level if level in LEVELS else "warning"  # as Horovod


def disables_stall_check(text: str) -> float | None:
    """Read a switch; None leaves the setting as it is."""
    return 0.0 if switch(text) else None


def timeline_path(text: str) -> str | None:
    """Read the path of a timeline. DYNAMIC is Horovod's word for one that starts later."""
    return None if text.upper() == "DYNAMIC" else text
