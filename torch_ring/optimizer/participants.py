"""Participants: the wrapped optimizers of a process set that live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from torch_ring._C import DenseFinalizer, Due, GradientHooks, PlannedBucket
from torch_ring.optimizer.gradient_report import BackwardReport, GradientReport
from torch_ring.optimizer.weight_comparison import WeightComparison

__all__ = ["FastPath", "Participant", "Participants", "Pending"]


Pending = tuple[bytes, bytes, bool, bool, bool, bool]
"""The result of `GradientHooks.pending`."""


class FastPath(NamedTuple):
    """The end of a pass in which all gradients of the only optimizer are due on all ranks."""

    finalizer: DenseFinalizer
    report: GradientReport  # which all ranks send then


class Participant(Protocol):
    """One optimizer's side of backward synchronisation (`torch_ring.optimizer.reducer.Reducer`)."""

    nothing_pending: bool
    """Whether the ranks have nothing to agree on before the step."""

    fast_path: FastPath | None
    """The fast path, once the buckets are in their final order and where there is one."""

    comparison: WeightComparison
    """The comparison of the ranks' weights."""

    steps: int
    """Steps that the optimizer has taken since then."""

    hooks: GradientHooks
    """Those of the optimizer's parameters."""

    names: Sequence[str]
    """The parameters' names."""

    @property
    def runs_ahead(self) -> bool:
        """Whether its buckets can be reduced without an agreement."""

    def bitmap(self, parameters: int) -> bytes:
        """Return a bitmap as the hooks take it."""

    def is_all(self, parameters: int) -> bool:
        """Return whether a bitmap has all parameters."""

    def planned_buckets(self, touched: int) -> list[PlannedBucket]:
        """Return how to reduce these parameters without an agreement. Only if `runs_ahead`."""

    def follow_parameters(self) -> None:
        """Give the parameters that have moved to another device memory there."""

    def stop_tuning(self) -> None:
        """Leave the buckets as they were planned: ranks may have counted passes differently."""

    def report(self, everything: bool) -> GradientReport | None:
        """Return which gradients are due here, or with `everything` which exist; None: none."""

    def prepare(self, touched: int, sparse: int, number: int) -> None:
        """Take the gradients of parameters that are about to be reduced.

        Another participant may have some of them too: all are prepared before the first one starts.

        Args:
            touched: those that have a gradient on some rank, as a bitmap.
            sparse: those of them whose gradients are sparse wherever there is one.
            number: the agreement's, a part of the names of the operations.
        """

    def ask_joined(self, touched: int, number: int, before: float, after: float) -> str:
        """Ask ranks that have just joined for the averaged gradients to which others were added.

        They have a part of those, and are missing in the sum that the ranks left will make.

        Args:
            touched: the parameters that are about to be reduced, as a bitmap.
            number: the agreement's.
            before: the scale of reduced gradients that held when others were added.
            after: that of the ranks left.

        Returns:
            Why the gradients of this pass cannot be right; "" if they will be.
        """

    def start(self, number: int) -> None:
        """Start to reduce the parameters that are prepared."""

    def start_bucket(self, bucket: int) -> None:
        """Start to reduce a bucket during the pass."""

    def new_memory(self, bucket: int) -> Tensor:
        """Return other memory for a bucket."""

    def finish(self, order: Sequence[int]) -> None:
        """Wait until they are reduced, then use rank 0's order of readiness, if there is one."""


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
