# SPDX-License-Identifier: Apache-2.0
"""WeightComparison: the ranks compare the weights of an optimizer automatically, and warn.

Gradients are averaged, weights are not. So a rank that starts from other weights, steps with a
gradient or a learning rate of its own, or writes into a weight trains another model from then on.
The ranks compare weights and hyper-parameters at an optimizer's first gradients, and then seldom:
after its steps 1, 10 and 100, and every 1000th one. They also compare them after the first step
that has averaged gradients itself: to clip these and averaged ones before it, each rank used a norm
of its own.

A comparison takes an 8-byte digest of all weights. It travels in the ranks' reports of a backward
pass (`BackwardSync`), so it needs no collective and no wait of its own. If the digests differ, the
ranks gather a digest of each parameter, and the lowest rank warns.

The weights are compared as they are after a step. In the middle of a step they may differ: SAM adds
each rank's own gradient to them. So they are read at the end of the step, on a device by its
stream, and the digest is sent with a later pass, when it is ready without a wait for the device.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_ring._C import Engine, GradientReport, PassReport, backward_name
from torch_ring.collectives.compare import (
    Difference,
    Line,
    Thing,
    find_difference,
    gather_lines,
    gather_lines_if_different,
    hyper_parameters_of,
    start_lines,
    summary_of,
)
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet

__all__ = ["WeightComparison", "WeightReports", "is_compared"]

_log = logging.getLogger("torch_ring")

_SUMMARY_BYTES = 8
_FIRST_STEPS, _EVERY = (1, 10, 100), 1000
_DEVICE_DELAY = 4  # passes: if a device is further behind, a wait of its host costs nothing


def is_compared(steps: int) -> bool:
    """Return whether the ranks compare an optimizer's weights after `steps` steps."""
    return steps in _FIRST_STEPS or (steps > 0 and steps % _EVERY == 0)


@dataclass(frozen=True)
class WeightSnapshot:
    """The weights and hyper-parameters of an optimizer after a step.

    Attributes:
        steps: the number of steps; 0: at the first gradients.
        first_pass: the first backward pass whose report may have the digest.
        has_averaged: whether the step has averaged gradients itself, as the first one.
        lines: waits for the digests of parameters and the values of hyper-parameters.
    """

    steps: int
    first_pass: int
    has_averaged: bool
    lines: Callable[[], list[Line]]

    def summary(self) -> bytes:
        """Return an 8-byte digest of all lines."""
        return summary_of(self.lines(), _SUMMARY_BYTES)


@dataclass
class WeightComparison:
    """The ranks' knowledge of each other's weights of one optimizer.

    All ranks draw the same conclusions from the same reports.

    Attributes:
        named: the weights and their names in messages; may grow.
        process_set: the ranks.
        optimizer: the optimizer, if it still exists.
        has_begun: whether the first comparison, since the start or since join(), has been made.
        snapshot: the snapshot to send next.
    """

    named: Mapping[Tensor, str]
    process_set: ProcessSet
    optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    has_begun: bool = False
    snapshot: WeightSnapshot | None = None
    _averaging: bool | None = None  # whether this step averages, as the first; None: none has yet
    _since: str = ""  # "" or " since join()", for messages
    _size: int = 0  # of the set; kept, since the last report may be read after the end of the world
    _reported: set[str] = field(default_factory=set)  # names of reported differences
    _equal: dict[str, int] = field(default_factory=dict)  # by kind: the last step with equal values

    @property
    def is_idle(self) -> bool:
        """Whether the next report has no digest."""
        return self.has_begun and self.snapshot is None

    def restart(self, since: str) -> None:
        """Count steps anew: all ranks have joined, and have taken different numbers of steps."""
        self.has_begun, self.snapshot, self._since = False, None, since
        self._equal.clear()

    def note_averaging_step(self) -> None:
        """Take note that the present step averages gradients that no pass has averaged."""
        if self._averaging is None:
            self._averaging = True

    def is_due(self, steps: int) -> bool:
        """Return whether the ranks compare the weights after the present step, of this number."""
        return is_compared(steps) or self._averaging is True

    def step_ended(self, steps: int, number: int, *, is_alone: bool) -> None:
        """Take a snapshot after a step, if it is due.

        Args:
            steps: the number of steps of the optimizer.
            number: the number of the next backward pass.
            is_alone: whether the step used gradients of this rank alone.
        """
        if not self.has_begun:
            self.snapshot = None  # it was of the weights before this step
        elif self.is_due(steps) and not is_alone:
            self.take(steps, number)
        if self._averaging:
            self._averaging = False

    def take(self, steps: int, number: int) -> None:
        """Take a snapshot after a step, or at the first gradients.

        Args:
            steps: the number of steps of the optimizer.
            number: the number of the next backward pass.
        """
        self._size = self.process_set.size()
        things = [Thing(name, parameter) for parameter, name in self.named.items()]
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is not None:
            things += hyper_parameters_of(optimizer)
        is_on_device = any(parameter.device.type != "cpu" for parameter in self.named)
        delay = _DEVICE_DELAY if is_on_device and steps else 0
        lines = functools.cache(start_lines(things))
        self.snapshot = WeightSnapshot(steps, number + delay, self._averaging is True, lines)

    def note_gradients(self, number: int) -> None:
        """Take a snapshot at the end of the first pass with gradients, which has this number.

        The ranks may compare them later, when they reduce the gradients of several passes.
        """
        if not self.has_begun and self.snapshot is None:
            self.take(0, number)

    def due_snapshot(self, number: int, *, has_due: bool) -> WeightSnapshot | None:
        """Return, once, the snapshot that travels with this rank's report of a pass, if any.

        Args:
            number: the number of the pass.
            has_due: whether the report has gradients to reduce.
        """
        if not self.has_begun:
            if not has_due:
                return None
            if self.snapshot is None:
                self.take(0, number)
        snapshot = self.snapshot
        if snapshot is None or snapshot.first_pass > number:
            return None
        self.snapshot = None
        return snapshot

    def compare_now(self, steps: int, engine: Engine, name: str) -> None:
        """Compare the ranks' present weights. A collective of the ranks that have not joined."""
        self.take(steps, 0)
        snapshot, self.snapshot = self.snapshot, None
        assert snapshot is not None
        self.conclude(snapshot, *gather_lines_if_different(snapshot.lines(), engine, name))

    def conclude(
        self, own: WeightSnapshot, ranks: int, every: Mapping[int, Sequence[Line]]
    ) -> None:
        """Warn on the lowest rank if something differs that did not before.

        Args:
            own: this rank's snapshot.
            ranks: the number of ranks compared, without those that have joined.
            every: the lines by rank; empty if all are equal.
        """
        self.has_begun = True
        is_whole = ranks == self._size
        reported, self._reported = self._reported, set() if is_whole else self._reported
        weights = {rank: lines[: len(self.named)] for rank, lines in every.items()}
        settings = {rank: lines[len(self.named) :] for rank, lines in every.items()}
        for kind, lines, text in (
            ("settings", settings, _different_settings),
            ("weights", weights, _different_weights),
        ):
            difference = find_difference(lines)
            if difference is None:
                if is_whole:
                    self._equal[kind] = own.steps
                continue
            is_new = not reported.issuperset(difference.names)
            self._reported = self._reported.union(difference.names)
            if is_new and current.rank() == min(every):
                in_set = "" if self.process_set.process_set_id == 0 else ", process_set=..."
                before = _before(own.steps, self._equal.get(kind), self._since)
                hint = _AVERAGED if own.has_averaged and kind == "weights" else ""
                _log.warning("%s%s", text(difference, before, in_set), hint)


class WeightReports:
    """Adds digests of weights to this rank's reports, and compares those in all ranks' reports.

    All ranks find the same differences in the same passes. They gather the details in the next
    agreed pass, in which all have read the reports of all passes before.

    Thread: the one that runs backward().

    Args:
        engine: the engine of the process set.
        comparison: returns the comparison for the optimizer index in another rank's report.
    """

    def __init__(self, engine: Engine, comparison: Callable[[int], WeightComparison]) -> None:
        self._engine = engine
        self._comparison = comparison
        # Snapshots by pass and optimizer, until the ranks' reports of the pass are read.
        self._sent: dict[int, dict[int, tuple[WeightComparison, WeightSnapshot]]] = {}
        self._different: list[tuple[WeightComparison, WeightSnapshot]] = []

    def forget(self) -> None:
        """Forget all passes: all ranks have joined."""
        self._sent.clear()
        self._different.clear()

    def added_to(
        self,
        reports: Sequence[GradientReport],
        number: int,
        comparisons: Mapping[int, WeightComparison],
    ) -> tuple[GradientReport, ...]:
        """Return the reports of a pass, with the digests that are due added.

        Args:
            reports: the reports of this rank's optimizers with gradients.
            number: the number of the pass.
            comparisons: the comparisons of all optimizers.
        """
        by_index = {report.optimizer: report for report in reports}
        for index, comparison in comparisons.items():
            if comparison.is_idle:
                continue
            report = by_index.get(index, GradientReport(index))
            snapshot = comparison.due_snapshot(number, has_due=bool(report.due))
            if snapshot is not None:
                self._sent.setdefault(number, {})[index] = comparison, snapshot
                by_index[index] = report.with_digest(snapshot.summary())
        return tuple(by_index.values())

    def differ(self, ranks: Sequence[PassReport], number: int) -> bool:
        """Compare the digests in the reports of a pass; return whether some differ."""
        sent = self._sent.pop(number, {})
        digests: dict[int, list[bytes]] = {}
        for report in (report for rank in ranks for report in rank.gradients if report.digest):
            digests.setdefault(report.optimizer, []).append(report.digest)
        count = len(self._different)
        for index, found in sorted(digests.items()):
            own = sent.get(index)
            is_whole = len(found) == len(ranks)
            if is_whole and own is not None and len(set(found)) == 1:
                comparison, snapshot = own
                comparison.conclude(snapshot, len(ranks), {})
            elif is_whole and own is not None:
                self._different.append(own)
            else:
                self._note_first(index, own, ranks, number)
        return len(self._different) > count

    def _note_first(
        self,
        index: int,
        own: tuple[WeightComparison, WeightSnapshot] | None,
        ranks: Sequence[PassReport],
        number: int,
    ) -> None:
        """Take note of an optimizer whose first gradients only some ranks have.

        If a rank without a digest has had gradients before, it has taken a step of its own: its
        weights are the program's business.
        """
        if own is None:
            if not any(r.due for rank in ranks for r in rank.gradients if r.optimizer == index):
                return
            comparison = self._comparison(index)
            if comparison.has_begun:
                return
            comparison.note_gradients(number)
            assert comparison.snapshot is not None
            own, comparison.snapshot = (comparison, comparison.snapshot), None
        if not own[0].has_begun:
            self._different.append(own)

    @property
    def has_differences(self) -> bool:
        """Whether the next agreed pass gathers details."""
        return bool(self._different)

    def tell(self, number: int) -> None:
        """Gather the differences, and warn. A collective, in an agreed pass."""
        different, self._different = self._different, []
        for index, (comparison, snapshot) in enumerate(different):
            name = f"{backward_name(number)}.weights.{index}"
            every = gather_lines(snapshot.lines(), self._engine, name)
            comparison.conclude(snapshot, len(every), every)


_AVERAGED = (
    ". That step has averaged gradients which no backward pass had averaged (set by the program, "
    "or computed under no_sync()): if the program clips all gradients before, each rank does so by "
    "a norm of its own. Call optimizer.synchronize() first, then clip, then step()"
)


def _before(steps: int, equal: int | None, since: str) -> tuple[str, str]:
    """Return the texts for the time of a difference, and for the last equality, if any."""
    if not steps:
        return "", ""
    when = f"after step {steps}{since} "
    if equal is None:
        return when, ""
    return (
        when,
        f"; {f'after step {equal}' if equal else 'at the first gradients'} all had the same",
    )


def _different_weights(difference: Difference, before: tuple[str, str], in_set: str) -> str:
    when, since = before
    (name, *_), others, root = difference.names, difference.others_in_words, difference.same[0]
    text = (
        f"{when}the ranks train different weights: '{name}' on {others} is not that on rank {root} "
        f"({len(difference.names)} of {difference.compared} parameters of this optimizer differ)"
        f"{since}. Gradients are averaged, weights are not, so they stay different: call "
        f"broadcast_parameters(model.state_dict(), root_rank={root}{in_set}) "
    )
    if not since:
        join = "" if in_set else ", and after join(), from the rank that join() returns"
        return f"{text}before the first step{join}"
    return (
        f"{text}and look for what one rank alone does: a gradient that it sets or changes after "
        "the average, a learning rate of its own, a write into a weight. TORCH_RING_CHECK_EVERY=1 "
        "makes the first step after which they differ an error"
    )


def _different_settings(difference: Difference, before: tuple[str, str], in_set: str) -> str:
    when, since = before
    others, root = difference.others_in_words, difference.same[0]
    return (
        f"{when}the ranks train with different hyper-parameters: {difference.names[0]} on {others} "
        f"({difference.found}) is not that on rank {root} ({difference.usual}); "
        f"{len(difference.names)} of {difference.compared} of this optimizer differ{since}. Each "
        "rank steps with its own, so that their weights drift apart: make them from values that "
        "all ranks have, such as a loss that allreduce() has averaged, or call "
        f"broadcast_optimizer_state(optimizer, root_rank={root}{in_set})"
    )
