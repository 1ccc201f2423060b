"""Participants: the wrapped optimizers of a process set that live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

from torch_ring._C import Due
from torch_ring.optimizer.gradient_report import BackwardReport
from torch_ring.optimizer.participant import Participant, Pending

__all__ = ["Participants"]


class Participants:
    """The participants by index, as long as somebody else holds them, or until they are removed.

    One may go at any moment, in any thread, also while others are looked at: an optimizer that a
    program has dropped in a circle of references goes when Python collects garbage. While the ranks
    agree and reduce, none goes: `hold`.

    Thread: any.

    Args:
        rank: this one.
        fail: ends the job on all ranks, and raises RingError.
    """

    def __init__(self, rank: int, fail: Callable[[str], None]) -> None:
        self._rank = rank
        self._fail = fail
        self._references: dict[int, weakref.ref[Participant]] = {}
        self._held: dict[int, Participant] = {}

    def add(self, index: int, participant: Participant) -> None:
        """Add a participant."""
        references = self._references
        references[index] = weakref.ref(participant, lambda _: references.pop(index, None))

    def remove(self, index: int) -> None:
        """Remove a participant, if it is there."""
        self._references.pop(index, None)

    def hold(self) -> list[Participant]:
        """Keep all as they are until `let_go`, and return them in the order of their indices."""
        self._held = dict(self.items())
        return list(self._held.values())

    def let_go(self) -> None:
        """End what `hold` has begun."""
        self._held = {}

    def __contains__(self, index: int) -> bool:
        return self.get(index) is not None

    def __getitem__(self, index: int) -> Participant:
        participant = self.get(index)
        if participant is None:
            raise KeyError(index)
        return participant

    def get(self, index: int) -> Participant | None:
        """Return a participant, or None."""
        if held := self._held.get(index):
            return held
        reference = self._references.get(index)
        return None if reference is None else reference()

    def items(self) -> list[tuple[int, Participant]]:
        """Return the participants and their indices, which ascend, at one moment."""
        if held := self._held:
            return list(held.items())
        found = [(index, reference()) for index, reference in list(self._references.items())]
        return [(index, participant) for index, participant in found if participant is not None]

    def values(self) -> list[Participant]:
        """Return the participants, in the order of their indices, at one moment."""
        return [participant for _, participant in self.items()]

    def named(self, index: int) -> Participant:
        """Return the participant whose gradients another rank's report names.

        Raises:
            RingError: on all ranks, there is none.
        """
        participant = self.get(index)
        if participant is None:
            self._fail(
                f"rank {self._rank} has dropped the wrapped optimizer {index}, for which another "
                "rank has gradients: wrap and drop optimizers alike on all ranks"
            )
        assert participant is not None
        return participant

    def started_gradients(
        self, pending: Mapping[int, Pending]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return the gradients that a planned pass takes: those that are due, or accumulate.

        Args:
            pending: what the hooks' `pending()` of each has returned.

        Returns:
            Bitmaps of the gradients by optimizer, and of those that are sparse.
        """
        gradients, sparse = {}, {}
        for index, (due, sparse_ones, accumulating, *_) in pending.items():
            if accumulating:
                due, sparse_ones, *_ = self[index].hooks.pending(Due.started)
            if any(due):
                gradients[index] = int.from_bytes(due, "little")
                sparse[index] = int.from_bytes(sparse_ones, "little")
        return gradients, sparse

    def reduce_reported(
        self, ranks: Sequence[BackwardReport], gradients: Mapping[int, int], number: int
    ) -> None:
        """Reduce gradients that reports have told of, by agreed operations. Collective.

        Args:
            ranks: the reports; all ranks have the same ones.
            gradients: what to reduce, as bitmaps by optimizer.
            number: the pass's.
        """
        dense = dict.fromkeys(gradients, 0)
        for report in (report for rank in ranks for report in rank.gradients):
            if report.participant in dense:
                dense[report.participant] |= report.due & ~report.sparse
        found = {index: self.named(index) for index in sorted(gradients)}
        for index, participant in found.items():
            participant.prepare(gradients[index], gradients[index] & ~dense[index], number)
        for participant in found.values():
            participant.start(number)
        for participant in found.values():
            participant.finish(())
