"""Deadline: the point in time at which a set-up gives up."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """The point in time at which init(), or the making of a process set, gives up.

    Args:
        timeout_s: seconds from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds that are left, 0 or more."""
        return max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        """Return whether it is too late."""
        return self.left_s() == 0.0

    def __str__(self) -> str:
        return f"within {self.timeout_s:g} s (TORCH_RING_INIT_TIMEOUT)"
