"""PassHistory: which gradients the ranks had in the last backward passes, and their cycle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Gradients", "PassHistory", "union_of", "without"]

_LONGEST = 8
"""The longest cycle, in passes: a GAN with seven steps of one network for one of the other."""

Gradients = Mapping[int, int]
"""The gradients of one pass: by optimizer, a bitmap of its parameters."""


class PassHistory:
    """The last passes of a process set. All ranks add the same ones, and so find the same cycle."""

    def __init__(self) -> None:
        self._last: deque[Gradients] = deque(maxlen=_LONGEST)
        # By length of the cycle: how many of the last passes repeat the one a cycle before.
        self._repeated = [0] * (_LONGEST + 1)

    def add(self, gradients: Gradients) -> None:
        """Add a pass. An empty one is like no other."""
        for length in range(1, _LONGEST + 1):
            repeats = len(self._last) >= length and gradients == self._last[-length] and gradients
            self._repeated[length] = self._repeated[length] + 1 if repeats else 0
        self._last.append(gradients)

    def clear(self) -> None:
        """Forget all passes."""
        self.__init__()  # type: ignore[misc]

    def cycle(self, repeats: int) -> Sequence[Gradients]:
        """Return the shortest cycle that has been repeated so often, or nothing.

        Its first pass is the one that comes next.
        """
        for length in range(1, _LONGEST + 1):
            if self._repeated[length] >= repeats * length:
                return list(self._last)[-length:]
        return []


def union_of(ranks: Iterable[Gradients]) -> dict[int, int]:
    """Return the gradients that any rank has."""
    union: dict[int, int] = {}
    for gradients in ranks:
        for index, bitmap in gradients.items():
            union[index] = union.get(index, 0) | bitmap
    return union


def without(gradients: Gradients, planned: Gradients) -> dict[int, int]:
    """Return the gradients that are not planned."""
    rest = {index: bitmap & ~planned.get(index, 0) for index, bitmap in gradients.items()}
    return {index: bitmap for index, bitmap in rest.items() if bitmap}
