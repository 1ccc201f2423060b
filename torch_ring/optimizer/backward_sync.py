"""BackwardSync: after each backward pass the ranks agree which gradients exist, and reduce them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torch_ring._C import Engine, PassAgreement, all_sent, backward_name, in_words
from torch_ring.errors import RingError
from torch_ring.optimizer.gradient_report import (
    BackwardReport,
    GradientReport,
    explained,
    require_same_steps,
)
from torch_ring.optimizer.participants import Participant, Participants
from torch_ring.optimizer.planned_pass import RunAhead
from torch_ring.optimizer.weight_reports import WeightReports
from torch_ring.world import current
from torch_ring.world.engine import interrupt_deferred
from torch_ring.world.process_set import ProcessSet, engine_of, membership
from torch_ring.world.process_set_table import ProcessSetRecord

__all__ = ["BackwardSync", "backward_sync_of"]


@dataclass
class BackwardSync:
    """Backward synchronisation of all wrapped optimizers of this process on one process set.

    A backward pass may touch several optimizers' parameters (GANs), and not the same ones on every
    rank. So each pass ends with one agreement about all of them: a gradient that exists on any rank
    is reduced on all, in the order of the optimizers' indices. The agreement is one allgather, of a
    few bytes an optimizer and a bit a parameter.

    A step must not begin before the gradients of all ranks are reduced, whoever made them. Usually
    the passes since the last step have reduced a gradient of every parameter; their agreements have
    told all ranks, and `reduce_pending` does nothing. Otherwise (accumulation, a rank that skipped
    backward, a parameter without a gradient, which the program may have set itself) it agrees once
    more. So it does if another optimizer has stepped since: a rank that skips backward does not
    know which optimizers the others' passes touch. If only this rank has accumulated since, the
    next agreement finds the ranks in different steps.

    A bucket may have been sent during the pass when another gradient comes for it (of a layer that
    is used in a reentrant checkpoint, too). Its rank says so in its report: as soon as the pass is
    reduced, all ranks agree once more, and reduce what has come again.

    A rank's first gradients for an optimizer travel with a digest of its weights, so that somebody
    who has forgotten broadcast_parameters() hears of it, and seldom later ones do, so that somebody
    whose ranks drift apart hears of that (`WeightComparison`).

    Ranks that have called join() take no part in agreements; reductions count them as zeros. A
    gradient that is averaged already, and gets more added, is scaled so that it counts once. The
    first pass after a rank has joined could not know that: the others ask it for that gradient,
    which it has kept, and add what their sum lacks.

    Ctrl-C may end the wait for an agreement: this rank's next pass then goes on from there, with
    the gradients that it has by then (`PassAgreement`). Once the ranks have agreed, Ctrl-C waits
    until they have reduced.

    Thread: the one that runs backward(), at most one at a time. Two passes at the same time end the
    job: the ranks could not tell which of their passes belong together. Blocking: until every rank
    has agreed.

    Attributes:
        process_set: the ranks.
        engine: the set's.
        size: the number of ranks.
        agreement: the next agreement of the ranks, or the one under way.
        run_ahead: passes that end without an agreement.
        weights: what the reports of passes say of the ranks' weights.
        steps: steps that the optimizers have taken, all together.

    Agreements and steps are counted since the start, or since join().
    """

    process_set: ProcessSet
    engine: Engine = field(init=False)
    size: int = field(init=False)
    agreement: PassAgreement = field(default_factory=PassAgreement)
    run_ahead: RunAhead = field(init=False)
    weights: WeightReports = field(init=False)
    steps: int = 0
    _since: str = ""  # how errors say since when
    _rank: int = field(default_factory=current.rank)
    _world_engine: Engine = field(default_factory=current.engine)
    _record: ProcessSetRecord = field(init=False)
    _registered: int = 0
    _active: int = field(init=False)  # ranks that had not joined in the last agreement
    _participants: Participants = field(init=False)

    def __post_init__(self) -> None:
        self.engine = engine_of(self.process_set)
        self.size = self._active = self.process_set.size()
        # Its objects must not keep it: a world ends also where Python collects no garbage.
        self._participants = Participants(self._rank, _weakly(self.fail))
        self._record = membership(self.process_set)

        self.weights = WeightReports(self.engine, self._participants)
        self.run_ahead = RunAhead(
            self.engine,
            self.agreement,
            self.size,
            self._participants,
            self.weights,
            _weakly(self._raise_explained),
        )
        if self._record.id == 0:  # no other set can be joined
            world = current.world()
            world.on_rejoin.append(self.resynchronize)
            self.run_ahead.watch(world)

    def on_backward_end(self) -> None:
        """End a backward pass on all process sets. Autograd calls it for each optimizer.

        It calls in an order that may differ between ranks, so the first call does it all, in the
        order of the sets' ids: two ranks with two sets in common never wait for each other. If this
        set has been removed, its closed engine raises: these gradients would not be averaged. A set
        of the same ranks that was added since, and has an optimizer, takes its place.

        After shutdown() this is left to the next step(), which will fail: the parameters may belong
        to an optimizer of a newer world by now.
        """
        world = current.find_world()
        if world is None:
            return
        is_synchronised = False
        for record in world.process_sets.records:
            sync = record.owned.get(BackwardSync)
            if sync is not None:
                sync.finalize()
                is_synchronised = is_synchronised or record.ranks == self._record.ranks
        if not is_synchronised and world.engine is self._world_engine:
            self.finalize()

    @property
    def number(self) -> int:
        """Agreements so far; a part of the names of the operations up to the next one."""
        return self.agreement.number

    @property
    def base_scale(self) -> float:
        """By how much a reduced gradient is to grow so that the ranks left give all of it."""
        return self.size / self._active

    def register(self, participant: Participant) -> int:
        """Return the participant's index. Call in the same order on all ranks."""
        self.run_ahead.begin_anew()
        index = self._registered
        self._participants.add(index, participant)
        self._registered += 1
        return index

    def share(self, participant: Participant) -> None:
        """Tell its hooks of all others of this process, which may be on the same parameters."""
        for record in current.world().process_sets.records:
            sync: BackwardSync | None = record.owned.get(BackwardSync)
            for other in sync._participants.values() if sync else ():
                if other is not participant:
                    participant.hooks.share(other.hooks)

    def unregister(self, participant: int) -> None:
        """Leave a participant out from now on, if it is registered. Thread: any."""
        self._participants.remove(participant)

    def start_bucket(self, participant: int, bucket: int) -> None:
        """Start to reduce a bucket. Called by autograd when all of it is due here."""
        found = self._participants.get(participant)
        if found is None:  # Python has collected it in the middle of a pass
            return
        try:
            found.start_bucket(bucket)
        except RingError as error:
            self._raise_explained(error)
            raise

    def new_memory(self, participant: int, bucket: int) -> Tensor:
        """Return other memory for a bucket."""
        return self._participants[participant].new_memory(bucket)

    def fail(self, why: str) -> None:
        """End the job on all ranks, and raise RingError."""
        self.engine.end(why)

    def finalize(self) -> None:
        """End a backward pass: agree with the other ranks, and reduce what is due on any."""
        self._begin_ending()
        try:
            participants = self._participants.hold()
            if len(participants) == 1 and self._finalize_dense(participants[0]):
                return
            if self.run_ahead.ends_pass(self.steps):
                return
            reports = self._reports()
            for report in reports:
                # Until they are reduced; under no_sync(), say, only this rank knows of them.
                self._participants[report.participant].nothing_pending = False
            self.weights.note_gradients(reports, self.number)
            if any(report.due for report in reports):
                self._agree(reports)
        finally:
            self._end_ending()

    def _begin_ending(self) -> None:
        """Begin the end of a pass; no gradient may arrive in other threads meanwhile."""
        if not self.agreement.begin_ending():
            self.fail("two threads end backward passes of wrapped optimizers at the same time")

    def _end_ending(self) -> None:
        self._participants.let_go()
        self.agreement.stop_ending()

    def _finalize_dense(self, participant: Participant) -> bool:
        """Take the fast path if all gradients are due here; return whether the pass has ended."""
        if participant.fast_path is None or not participant.comparison.is_idle:
            return False
        finalizer, report = participant.fast_path
        own = BackwardReport(self.steps, (report,)).encode()
        number, nothing_pending = self.number, participant.nothing_pending
        participant.nothing_pending = False
        try:
            differing = finalizer.run(self.engine, self.agreement, own)
        except RingError as error:
            self._raise_explained(error)
            raise
        except BaseException:  # Ctrl-C, which the end of the pass may have deferred
            participant.nothing_pending = self.number != number
            raise
        if differing is None:
            participant.nothing_pending = nothing_pending
            return False
        if differing:
            self._reduce_all(list(BackwardReport.decode_all(memoryview(differing))))
        else:
            participant.nothing_pending = True
        return True

    def reduce_pending(self, participant: Participant) -> None:
        """Reduce whatever a rank has for `participant`: accumulated, or set by the program."""
        if participant.nothing_pending:
            # Else every parameter has been reduced.
            if not (self.run_ahead.is_planned and participant.hooks.set_by_hand()):
                return
            participant.nothing_pending = False
        self._begin_ending()
        try:
            self._participants.hold()
            is_settled = False
            while not (is_settled or participant.nothing_pending):
                if self.run_ahead.ends_pass(self.steps, participant):
                    continue
                is_settled = self._agree(self._reports(participant), participant)
        finally:
            self._end_ending()

    def finish_step(self, participant: Participant) -> None:
        """Count a step of a participant."""
        self.steps += 1
        participant.nothing_pending = False
        if self._registered > 1 and not self.run_ahead.is_planned:
            for other in self._participants.values():
                other.nothing_pending = False

    def resynchronize(self) -> None:
        """Reset what the ranks may have counted differently: join() returns on all of them."""
        self.agreement.restart(0)
        self.run_ahead.forget()
        self.steps = 0
        self._active = self.size
        self._since = " since join()"
        for participant in self._participants.values():
            participant.nothing_pending = False
            participant.steps = 0
            participant.hooks.set_base_scale(1.0)
            participant.stop_tuning()
        self.weights.restart(self._since)  # a rank that had joined has not stepped

    def _reports(self, stepping: Participant | None = None) -> tuple[GradientReport, ...]:
        participants = self._participants.values()
        reports = [participant.report(participant is stepping) for participant in participants]
        return tuple(report for report in reports if report)

    def _agree(
        self, reports: tuple[GradientReport, ...], stepping: Participant | None = None
    ) -> bool:
        """Tell the other ranks, and reduce the gradients that are due on any of them.

        Returns:
            Whether `stepping` has nothing more to wait for: all ranks are about to step.
        """
        reports = self._with_aside(reports, stepping)
        report = BackwardReport(self.steps, self.weights.added_to(reports, self.number))
        own = report.encode()
        goes_on = self.agreement.is_open  # with an earlier report, of a pass that was interrupted
        try:
            gathered = self.agreement.gather(self.engine, own)
        except RingError as error:
            self._raise_explained(error)
            raise
        if all_sent(gathered, own):  # the usual case: nothing to decode
            ranks = [report] * (len(gathered) // len(own))
        else:
            ranks = list(BackwardReport.decode_all(memoryview(gathered)))
        if self._reduce_all(ranks):
            return self._agree(self._reports(stepping), stepping)
        if goes_on:
            for rest in self._reports():  # of which the earlier report did not know
                self._participants[rest.participant].nothing_pending = False
        distinct = _distinct(ranks)
        return all(rank.is_of_step for rank in distinct) and not any(
            told.accumulating and self._participants.get(told.participant) is stepping
            for rank in distinct
            for told in rank.gradients
        )

    def _with_aside(
        self, reports: tuple[GradientReport, ...], stepping: Participant | None
    ) -> tuple[GradientReport, ...]:
        """Return the reports with what planned passes have put aside, for optimizers in use now.

        Another one's gradients would not live until it steps: its zero_grad() may come first. But
        the other ranks hear of them in this report, and not before: till then this rank's steps
        must be those of ranks that know of none.
        """
        used = [
            report.participant
            for report in reports
            if report.due or self._participants[report.participant] is stepping
        ]
        taken = [index for index in used if self.run_ahead.take_up_aside(index)]
        reports = self._reports(stepping) if taken else reports
        told = {report.participant for report in reports}
        left = [index for index in self.run_ahead.aside - told if index in self._participants]
        return (
            *reports,
            *(GradientReport(index, due=0, accumulating=True) for index in sorted(left)),
        )

    def _reduce_all(self, ranks: Sequence[BackwardReport]) -> bool:
        """Reduce, and end the agreement; Ctrl-C waits for that.

        Returns:
            Whether the ranks agree once more at once, as gradients have come again.
        """
        with interrupt_deferred():
            self.agreement.begin_reduction()
            try:
                self._reduce(ranks)
            except Exception:
                self.agreement.finish()
                raise
            self.agreement.finish()
            agrees_again = any(rank.agrees_again for rank in _distinct(ranks))
            if agrees_again:
                for participant in self._participants.values():
                    participant.hooks.take_up_aside(again=True)
        return agrees_again

    def _raise_explained(self, error: RingError, name: str = "") -> None:
        """Raise the error of an agreement with what its user may have done wrong, if that helps."""
        purpose = f"rank {self._rank}: {in_words(name or backward_name(self.number))}"
        done = f"{self.number} backward pass{'es' if self.number != 1 else ''}{self._since}"
        better = explained(error, purpose, done)
        if better is not None:
            raise better from error

    def _follow_joins(self, ranks: Sequence[BackwardReport], touched: Mapping[int, int]) -> None:
        """Take note of the ranks that have joined, if some have since the pass before.

        This pass did not know: a gradient that it has added to an averaged one is a sum of fewer.
        So ask them for what they have kept of those.

        Args:
            ranks: the reports of the others.
            touched: the gradients that are about to be reduced, by optimizer.
        """
        if len(ranks) == self._active:
            return
        before, self._active = self.base_scale, len(ranks)
        told = (report for rank in ranks for report in rank.gradients)
        for index in sorted({each.participant for each in told if each.due or each.on_base}):
            participant = self._participants.named(index)
            due = touched.get(index, 0)
            problem = participant.ask_joined(due, self.number, before, self.base_scale)
            if problem:
                self.fail(
                    f"rank {self._rank}: a rank has joined, and this backward pass has added its "
                    "gradients to others that are averaged already, of which that rank has a part: "
                    f"{problem}. Call zero_grad() in each step; to add up several passes, use "
                    "backward_passes_per_step or no_sync(), or call join() between two steps only"
                )
        for participant in self._participants.values():
            participant.hooks.set_base_scale(self.base_scale)

    def _reduce(self, ranks: Sequence[BackwardReport]) -> None:
        """Reduce the gradients that are due on any rank, by the reports of all of them."""
        number = self.number
        require_same_steps([rank.steps for rank in ranks], self.size)
        self.weights.differ(ranks, number)
        self.weights.tell(number)
        distinct = _distinct(ranks)
        is_of_step = all(rank.is_of_step for rank in distinct)
        touched: dict[int, int] = {}
        for report in (
            report
            for rank in distinct
            if is_of_step or not rank.is_of_step
            for report in rank.gradients
        ):
            touched[report.participant] = touched.get(report.participant, 0) | report.due
        dense = dict.fromkeys(touched, 0)
        accumulating = set()
        for report in (report for rank in distinct for report in rank.gradients):
            index = report.participant
            is_here = touched.get(index, 0)
            if is_here:
                dense[index] |= is_here & report.due & ~report.sparse
            # Gradients that only stepping ranks have wait for the step of those that are in a pass:
            # their programs may set the same gradient by hand after it.
            if report.accumulating or report.again or report.due & ~is_here:
                accumulating.add(index)
        # A rank that has joined does not hear of an order, and must keep the same plan.
        everybody = len(ranks) == self.size
        orders = {r.participant: r.order for r in ranks[0].gradients} if everybody else {}
        reduced = [
            (index, self._participants.named(index), due)
            for index, due in sorted(touched.items())
            if due
        ]
        self._follow_joins(ranks, touched)
        for index, participant, due in reduced:
            participant.prepare(due, due & ~dense[index], number)
        for _, participant, _ in reduced:
            participant.start(number)
        for index, participant, _ in reduced:
            participant.finish(orders.get(index, ()))
        if reduced or not is_of_step:  # else no pass, and no gradient that one has left
            is_steady = everybody and not (accumulating or is_of_step) and dense == touched
            self.run_ahead.learn(number, touched if is_steady else {})
        covered = {index for index, participant, due in reduced if participant.is_all(due)}
        lacking = {r.participant for rank in distinct for r in rank.gradients if r.incomplete}
        incomplete = lacking - covered
        left = accumulating if self.run_ahead.is_planned else accumulating | incomplete
        # An optimizer whose gradients only accumulate may be here no more, and elsewhere still: one
        # that a program has dropped is told of until Python collects garbage.
        for report in (report for rank in distinct for report in rank.gradients):
            found = self._participants.get(report.participant)
            if found is not None and (report.due or report.accumulating or report.stepping):
                found.nothing_pending = report.participant not in left


def _distinct(ranks: Sequence[BackwardReport]) -> list[BackwardReport]:
    """Return the reports once each: as a rule those of all ranks are equal, and one object."""
    return list({id(rank): rank for rank in ranks}.values())


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method, and does not keep its object."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        assert found is not None, "its object outlives what calls it"
        found(*args)

    return call


def backward_sync_of(process_set: ProcessSet) -> BackwardSync:
    """Return the synchronisation of all optimizers on a process set. This rank is a member."""
    owned = membership(process_set).owned
    if BackwardSync not in owned:
        owned[BackwardSync] = BackwardSync(process_set)
    sync: BackwardSync = owned[BackwardSync]
    return sync
