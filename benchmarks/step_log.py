"""StepLog: the times at which ranks have ended steps, in memory that forked ranks share."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass

FIELDS = 2  # of an entry: the time on the common clock (s), and the number of ranks
MOST = 20_000  # entries of a rank


@dataclass(frozen=True)
class Step:
    """The end of a step on one rank: the time, and the number of ranks."""

    ended: float
    size: int


class StepLog:
    """The steps of each rank. Made before the ranks are forked; each writes its own part.

    The count of a rank's entries, its first number, is written after the entry, so a rank that is
    killed while it writes leaves no partial entry.
    """

    def __init__(self, ranks: int) -> None:
        self._stride = 1 + FIELDS * MOST
        self._numbers = memoryview(mmap.mmap(-1, 8 * ranks * self._stride)).cast("d")

    def add(self, rank: int, size: int) -> None:
        """Note that a step has ended now."""
        start = rank * self._stride
        count = int(self._numbers[start])
        at = start + 1 + FIELDS * count
        self._numbers[at], self._numbers[at + 1] = time.monotonic(), size
        self._numbers[start] = count + 1

    def count(self, rank: int) -> int:
        """Return the number of steps that a rank has ended."""
        return int(self._numbers[rank * self._stride])

    def steps_of(self, rank: int) -> list[Step]:
        """Return the steps of a rank, in order."""
        start = rank * self._stride + 1
        ends = range(start, start + FIELDS * self.count(rank), FIELDS)
        return [Step(self._numbers[at], int(self._numbers[at + 1])) for at in ends]
