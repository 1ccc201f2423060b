"""Reducers: those of a process set's optimizers, by index."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch_ring.optimizer.reducer import Reducer
from torch_ring.optimizer.weight_comparison import WeightComparison

__all__ = ["Reducers"]


class Reducers:
    """The reducers of a process set by index, as weak references.

    A reducer may disappear at any moment, in any thread: an optimizer that a program has dropped in
    a reference cycle is deleted when Python collects garbage. `hold` keeps all reducers while the
    ranks agree and reduce.

    Thread: any.

    Args:
        rank: this rank.
        fail: ends the job on all ranks, and raises RingError.
    """

    def __init__(self, rank: int, fail: Callable[[str], None]) -> None:
        self._rank = rank
        self._fail = fail
        self._references: dict[int, weakref.ref[Reducer]] = {}
        self._held: dict[int, Reducer] = {}

    def add(self, index: int, reducer: Reducer) -> None:
        """Add a reducer, until it is removed."""
        references = self._references
        references[index] = weakref.ref(reducer, lambda _: references.pop(index, None))

    def remove(self, index: int) -> None:
        """Remove a reducer, if it is there."""
        self._references.pop(index, None)

    def living(self) -> list[Reducer]:
        """Return the reducers that are there now, whether `hold` keeps others or not."""
        found = [reference() for reference in list(self._references.values())]
        return [reducer for reducer in found if reducer is not None]

    def hold(self) -> list[Reducer]:
        """Keep all reducers alive until `let_go`; return them in the order of their indices."""
        self._held = dict(self.items())
        return list(self._held.values())

    def let_go(self) -> None:
        """End the effect of `hold`."""
        self._held = {}

    def __contains__(self, index: int) -> bool:
        return self.get(index) is not None

    def __getitem__(self, index: int) -> Reducer:
        reducer = self.get(index)
        if reducer is None:
            raise KeyError(index)
        return reducer

    def get(self, index: int) -> Reducer | None:
        """Return a reducer, or None."""
        if held := self._held.get(index):
            return held
        reference = self._references.get(index)
        return None if reference is None else reference()

    def items(self) -> list[tuple[int, Reducer]]:
        """Return a snapshot of the indices, ascending, and reducers."""
        if held := self._held:
            return list(held.items())
        found = [(index, reference()) for index, reference in list(self._references.items())]
        return [(index, reducer) for index, reducer in found if reducer is not None]

    def values(self) -> list[Reducer]:
        """Return a snapshot of the reducers, in the order of their indices."""
        return [reducer for _, reducer in self.items()]

    def named(self, index: int) -> Reducer:
        """Return the reducer of an optimizer that another rank's report names.

        Raises:
            RingError: on all ranks: there is none.
        """
        reducer = self.get(index)
        if reducer is None:
            self._fail(
                f"rank {self._rank} has dropped the wrapped optimizer {index}, for which another "
                "rank has gradients: wrap and drop optimizers alike on all ranks"
            )
        assert reducer is not None
        return reducer

    def comparison(self, index: int) -> WeightComparison:
        """Return the weight comparison of an optimizer that another rank's report names."""
        return self.named(index).comparison

    def comparisons(self) -> dict[int, WeightComparison]:
        """Return the weight comparisons of all optimizers."""
        return {index: reducer.comparison for index, reducer in self.items()}
