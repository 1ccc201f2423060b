"""WeightReports: the digests of weights in the ranks' reports of backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_ring._C import Engine, backward_name
from torch_ring.collectives.compare import gather_lines
from torch_ring.optimizer.gradient_report import BackwardReport, GradientReport
from torch_ring.optimizer.participants import Participants
from torch_ring.optimizer.weight_comparison import Snapshot, WeightComparison

__all__ = ["WeightReports"]


class WeightReports:
    """Adds digests of weights to this rank's reports, and compares those in all ranks' reports.

    All ranks find the same differences in the same passes. They gather the details in the next
    agreed pass, in which all have read the reports of all passes before.

    Thread: the one that runs backward().

    Args:
        engine: of the process set.
        participants: its wrapped optimizers.
    """

    def __init__(self, engine: Engine, participants: Participants) -> None:
        self._engine = engine
        self._participants = participants
        # By pass and optimizer, until the ranks' reports of the pass are read.
        self._sent: dict[int, dict[int, tuple[WeightComparison, Snapshot]]] = {}
        self._different: list[tuple[WeightComparison, Snapshot]] = []

    def restart(self, since: str) -> None:
        """Begin anew: all ranks have joined."""
        self._sent.clear()
        self._different.clear()
        for participant in self._participants.values():
            participant.comparison.restart(since)

    def note_gradients(self, reports: Sequence[GradientReport], number: int) -> None:
        """Remember the weights of optimizers at the end of the first pass that brings gradients.

        The ranks may compare them later, when they reduce the gradients of several passes.
        """
        for report in reports:
            comparison = self._participants[report.participant].comparison
            if not comparison.has_begun and comparison.snapshot is None:
                comparison.take(0, number)

    def added_to(
        self, reports: Sequence[GradientReport], number: int
    ) -> tuple[GradientReport, ...]:
        """Return the reports of a pass with the digests that are to travel with it."""
        by_index = {report.participant: report for report in reports}
        for index, participant in self._participants.items():
            report = by_index.get(index, GradientReport(index, due=0))
            comparison = participant.comparison
            snapshot = comparison.due_snapshot(number, has_due=bool(report.due))
            if snapshot is not None:
                self._sent.setdefault(number, {})[index] = comparison, snapshot
                by_index[index] = replace(report, digest=snapshot.summary())
        return tuple(by_index.values())

    def differ(self, ranks: Sequence[BackwardReport], number: int) -> bool:
        """Compare the digests in the reports of a pass; return whether some differ."""
        sent = self._sent.pop(number, {})
        digests: dict[int, list[bytes]] = {}
        for report in (report for rank in ranks for report in rank.gradients if report.digest):
            digests.setdefault(report.participant, []).append(report.digest)
        count = len(self._different)
        for index, found in sorted(digests.items()):
            own = sent.get(index)
            is_whole = len(found) == len(ranks)
            if is_whole and own is not None and len(set(found)) == 1:
                comparison, snapshot = own
                comparison.conclude(snapshot.steps, len(ranks), {})
            elif is_whole and own is not None:
                self._different.append(own)
            else:
                self._note_first(index, own, ranks, number)
        return len(self._different) > count

    def _note_first(
        self,
        index: int,
        own: tuple[WeightComparison, Snapshot] | None,
        ranks: Sequence[BackwardReport],
        number: int,
    ) -> None:
        """Take note of an optimizer whose first gradients only some ranks have.

        After its first ones, a rank that sends no digest has taken a step of its own: what it has
        is for the program to know.
        """
        if own is None:
            if not any(r.due for rank in ranks for r in rank.gradients if r.participant == index):
                return
            comparison = self._participants.named(index).comparison
            if comparison.has_begun:
                return
            if comparison.snapshot is None:
                comparison.take(0, number)
            assert comparison.snapshot is not None
            own, comparison.snapshot = (comparison, comparison.snapshot), None
        if not own[0].has_begun:
            self._different.append(own)

    def tell(self, number: int) -> None:
        """Gather what differs, and warn. A collective, in an agreed pass."""
        different, self._different = self._different, []
        for index, (comparison, snapshot) in enumerate(different):
            name = f"{backward_name(number)}.weights.{index}"
            every = gather_lines(snapshot.lines(), self._engine, name)
            comparison.conclude(snapshot.steps, len(every), every)
