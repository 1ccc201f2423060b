"""Deadline: the point in time at which a set-up gives up."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

__all__ = ["Deadline", "pauses"]


class Deadline:
    """The point in time at which init(), or the making of a process set, gives up.

    Args:
        timeout_s: seconds from now.
        name: of the setting that says so.
    """

    def __init__(self, timeout_s: float, name: str = "TORCH_RING_INIT_TIMEOUT") -> None:
        self.timeout_s, self._name = timeout_s, name
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds that are left, 0 or more."""
        return max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        """Return whether it is too late."""
        return self.left_s() == 0.0

    def end(self) -> None:
        """Let it be too late now. Thread: any."""
        self._at = -math.inf

    def __str__(self) -> str:
        return f"within {self.timeout_s:g} s ({self._name})"


def pauses(deadline: Deadline, size: int) -> Iterator[None]:
    """Yield until the deadline, and sleep in between: little at first, then longer.

    Args:
        deadline: when to end.
        size: the number of ranks that may share a processor, and look as often.
    """
    pause_s, longest_s = 0.0005, 0.005 + 1e-4 * size
    while not deadline.passed():
        yield
        time.sleep(min(pause_s, deadline.left_s()))
        pause_s = min(1.5 * pause_s, longest_s)
