# SPDX-License-Identifier: Apache-2.0
"""BackwardSync: after each backward pass the ranks agree which gradients exist, and reduce them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from torch_ring._C import (
    GradientReport,
    PassAgreement,
    PassDecision,
    PassEnd,
    PassReport,
    backward_name,
    in_words,
)
from torch_ring.errors import RingError
from torch_ring.optimizer.bucket_wire import ReductionSettings
from torch_ring.optimizer.gradient_report import end_given_up, explained, require_same_steps
from torch_ring.optimizer.parameters import require_same_parameters
from torch_ring.optimizer.planned_pass import PlannedPasses
from torch_ring.optimizer.reducer import Reducer, Reducers, weakly
from torch_ring.optimizer.slow_links import AFTER_STEPS, advice
from torch_ring.optimizer.weight_comparison import WeightReports
from torch_ring.world import current
from torch_ring.world.engine import interrupt_deferred
from torch_ring.world.process_set import ProcessSet, engine_of, membership

__all__ = ["BackwardSync", "backward_sync_of"]

_log = logging.getLogger("torch_ring")


class BackwardSync:
    """Backward synchronisation of all wrapped optimizers of this process on one process set.

    A backward pass may touch several optimizers' parameters (GANs), and not the same ones on every
    rank. So each pass ends with one agreement about all of them: a gradient that exists on any rank
    is reduced on all, in the order of the optimizers' indices. The agreement is one allgather, of a
    few bytes an optimizer and a bit a parameter.

    A step must not begin before all gradients of all ranks are reduced. Usually the passes since
    the last step have reduced a gradient of every parameter; all ranks know this from the
    agreements, and `reduce_pending` does nothing. Otherwise (accumulation, a rank that skipped
    backward, a parameter without a gradient, which the program may have set itself) it agrees once
    more. It also does so if another optimizer has stepped since: a rank that skips backward does
    not know which optimizers the others' passes touch. If only this rank has accumulated since, the
    next agreement finds the ranks in different steps.

    Another gradient may arrive for a bucket that was already sent during the pass (a layer may be
    used in a reentrant checkpoint, too). The rank reports it: as soon as the pass is reduced, all
    ranks agree once more, and reduce the late gradients.

    A rank's first report with gradients for an optimizer has a digest of its weights, which reveals
    a forgotten broadcast_parameters(). A few later reports have one, too, which reveals ranks that
    drift apart (`WeightComparison`).

    Ranks that have called join() take no part in agreements; reductions count them as zeros. What
    was averaged before they joined stays: a gradient that is added to an averaged one is reduced
    alone, and then added to that.

    Ctrl-C may interrupt the wait for an agreement: this rank's next pass then continues it, with
    the gradients that it has by then (`PassAgreement`). Once the ranks have agreed, Ctrl-C takes
    effect after the reduction. Any other exception in backward(), if a program catches it and goes
    on, is reported by the rank's next pass or step, and ends the job unless all ranks report one.

    Thread: the one that runs backward(), at most one at a time. Two passes at the same time end the
    job: the ranks could not match their passes. Blocking: until every rank has agreed.

    Args:
        process_set: the ranks.

    Attributes:
        agreement: the next agreement of the ranks, or the present one.
        run_ahead: passes that end without an agreement.
        steps: total number of steps of all optimizers.

    Agreements and steps are counted since the start, or since join().
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self.agreement = PassAgreement()
        self.steps = 0
        self._since = ""  # "" or " since join()", for errors
        self._process_set = process_set
        self._record = membership(process_set)
        self._engine = engine_of(process_set)
        self._world_engine = current.engine()
        self._rank = current.rank()
        self._size = process_set.size()
        self._added = 0  # reducers so far
        self._has_advised = False
        self._end: PassEnd | None = None  # of the last pass, until `_take_note`
        # These objects must not refer to this one: the world must end without garbage collection.
        self._reducers = Reducers(self._rank, self._engine.end)
        self._weights = WeightReports(self._engine, self._reducers.comparison)
        self.run_ahead = PlannedPasses(
            self._engine,
            self.agreement,
            self._size,
            self._reducers,
            self._weights,
            weakly(self._raise_explained),
        )
        if self._record.id == 0:  # no other set can be joined
            world = current.world()
            world.before_join.append(self._refuse_sent_in_vain)
            world.on_rejoin.append(self.resynchronize)
            self.run_ahead.watch(world)

    def on_backward_end(self) -> None:
        """End a backward pass on all process sets. Autograd calls it for each optimizer.

        The order of these calls may differ between ranks. So the first call ends the pass on all
        sets, in the order of their ids: then two ranks with two sets in common never wait for each
        other. If this set has been removed, its closed engine raises: these gradients would not be
        averaged. If a set of the same ranks has been added since, and has an optimizer, that set
        takes its place.

        After shutdown() this does nothing, and the next step() fails: the parameters may belong to
        an optimizer of a newer world.
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
        """The number of agreements so far; a part of the operations' names up to the next one."""
        return self.agreement.number

    def add(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        settings: ReductionSettings,
        groups: Sequence[Sequence[int]] = (),
        before: Reducer | None = None,
    ) -> Reducer:
        """Make the reducer of an optimizer's parameters. Collective.

        All ranks add their reducers in the same order, for the same parameters.

        Args:
            parameters: leaves, whether they require grad now or not.
            names: the parameters' names in errors.
            settings: how to reduce the gradients.
            groups: indices of parameters whose gradients stay together (`plan_buckets`).
            before: the optimizer's reducer so far, whose gradients the new one takes over.

        Raises:
            MismatchError: the parameters differ between ranks.
            ValueError: a parameter cannot be reduced.
        """
        require_same_parameters(self._process_set, parameters, names, settings, groups)
        self.run_ahead.stop()
        index = self._added
        self._added += 1
        reducer = Reducer(
            self._process_set,
            index,
            self.agreement,
            parameters,
            names,
            settings,
            groups,
            on_backward_end=self.on_backward_end,
            on_bucket_full=functools.partial(self._start_bucket, index),
            run_ahead=self.run_ahead.hooks,
        )
        self._reducers.add(index, reducer)
        Reducer.assign_slots([*_living_reducers(), *([before] if before is not None else [])])
        return reducer

    def leave(self, reducer: Reducer) -> None:
        """Ignore the gradients of an optimizer that is gone, but for slots of others. Thread: any.

        Takes no lock: Python may be collecting garbage anywhere.
        """
        if any(reducer in each.owners() for each in _living_reducers()):
            reducer.hooks.leave()
        else:
            self.remove(reducer)

    def remove(self, reducer: Reducer) -> None:
        """Ignore the gradients of an optimizer from now on. Thread: any."""
        reducer.hooks.disable()
        self._reducers.remove(reducer.index)
        reducer.nothing_pending = True

    def _start_bucket(self, index: int, bucket: int) -> None:
        """Start to reduce a bucket. Called by autograd when all its gradients are due here."""
        found = self._reducers.get(index)
        if found is None:  # garbage-collected in the middle of a pass
            return
        try:
            found.start_bucket(bucket)
        except RingError as error:
            self._raise_explained(error)
            raise

    def finalize(self) -> None:
        """End a backward pass: agree with the other ranks, and reduce all gradients due on any."""
        self._begin_ending(of_step=False)
        try:
            self._take_note()
            reducers = self._reducers.pin()
            if self._ends_plainly(reducers) or self.run_ahead.ends_pass(self.steps):
                return
            reports = self._reports()
            for report in reports:
                # The gradients are pending until reduced. Under no_sync() only this rank knows.
                self._note_pending(report.optimizer)
                self._reducers[report.optimizer].comparison.note_gradients(self.number)
            if any(report.is_due for report in reports):
                self._agree(reports)
        finally:
            self._end_ending()

    def _ends_plainly(self, reducers: Sequence[Reducer]) -> bool:
        """End a pass by C++, if no optimizer needs Python; return whether it has ended."""
        plain = []
        for reducer in reducers:
            reduction = reducer.plain
            if reduction is None or not reducer.comparison.is_idle:
                return False
            plain.append(reduction)
        if self.agreement.is_open or self._weights.has_differences or not plain:
            return False
        self._end = end = PassEnd()
        try:
            if not end.run_plain(self._engine, self.agreement, self._rank, self.steps, plain):
                return False
        except RingError as error:
            if not end.reports:
                self._raise_explained(error)
            raise
        if end.is_complete and len(reducers) == 1 and not reducers[0].not_finite:
            reducers[0].nothing_pending, self._end = True, None
            end.raise_interrupt()
        else:
            self._conclude(end)
        return True

    def _note_pending(self, index: int) -> None:
        """Take note that an optimizer, and those with slots in it, have gradients to reduce."""
        reducer = self._reducers.get(index)
        for each in self._reducers.values():
            if each is reducer or (each.elsewhere and reducer in each.owners()):
                each.nothing_pending = False

    def _begin_ending(self, *, of_step: bool) -> None:
        """Begin the end of a pass, or a step; no gradient may arrive in other threads meanwhile."""
        if not self.agreement.begin_ending(of_step=of_step):
            self._engine.end(
                "two threads end backward passes of wrapped optimizers at the same time"
            )

    def _end_ending(self) -> None:
        self._reducers.unpin()
        self.agreement.stop_ending()

    def reduce_pending(self, reducer: Reducer) -> None:
        """Reduce the gradients of `reducer` that a rank has accumulated, or its program has set."""
        reducer.require_slots_on_set()
        self._take_note()
        if reducer.nothing_pending:
            # In other cases every parameter has been reduced.
            is_set_by_hand = self.run_ahead.may_have_missed and reducer.hooks.set_by_hand()
            failed = [each.hooks.has_failed() for each in (reducer, *reducer.owners())]
            if not (is_set_by_hand or any(failed) or self.agreement.failure):
                return
            reducer.nothing_pending = False
        self._begin_ending(of_step=True)
        try:
            self._reducers.pin()
            is_done = False
            while not (is_done or reducer.nothing_pending):
                if self.run_ahead.ends_pass(self.steps, reducer):
                    continue
                is_done = self._agree(self._reports(reducer), reducer)
        finally:
            self._end_ending()

    def expect_gradients(self, reducer: Reducer) -> None:
        """Let the ranks agree before the next step: a closure is about to compute gradients."""
        self._take_note()
        reducer.nothing_pending = False

    def finish_step(self, reducer: Reducer) -> None:
        """Count a step of an optimizer, and begin the next."""
        self._take_note()
        self.steps += 1
        reducer.finish_step()
        if reducer.steps == AFTER_STEPS:
            self._advise()
        if self._added > 1 and not self.run_ahead.is_planned:
            for other in self._reducers.values():
                other.nothing_pending = False

    def _advise(self) -> None:
        """Log on rank 0 whether steps wait for the network; once in a world of several hosts."""
        world = current.find_world()
        if self._rank > 0 or world is None or world.engine is not self._world_engine:
            return
        hosts = len({world.host_of[rank] for rank in self._record.ranks})
        syncs = [record.owned.get(BackwardSync) for record in world.process_sets.records]
        if hosts == 1 or any(sync is not None and sync._has_advised for sync in syncs):
            return
        self._has_advised = True
        line = advice(self._engine.records(), self.steps, self.number, hosts)
        if line is not None:
            _log.warning("%s", line)

    def drop_gradients(self, reducer: Reducer) -> None:
        """Drop an optimizer's accumulated gradients: they are zero or None now."""
        self._take_note()
        for each in (reducer, *reducer.owners()):
            self._note_pending(each.index)
        reducer.drop_not_finite()
        reducer.hooks.reset(gradients=True)
        if reducer.hooks.parameters_moved():
            self._follow_parameters(reducer)

    def _follow_parameters(self, reducer: Reducer) -> None:
        """Make new buckets for parameters that have moved to another device."""
        if reducer.has_started or self.run_ahead.has_launched:
            self._engine.end(
                "parameters have moved to another device, and part of the gradients had been sent "
                "when a backward pass found that: call zero_grad() after moving a model"
            )
        self.run_ahead.stop()
        reducer.follow_parameters()

    def _refuse_sent_in_vain(self) -> None:
        """End the job if a part of this rank's failed pass would count as its share of the next."""
        if self.agreement.has_sent_in_vain:
            self._engine.end(self.agreement.failure)

    def resynchronize(self) -> None:
        """Reset the counters that may differ between ranks: join() returns on all of them."""
        self._end = None
        self.agreement.restart(0)
        self.run_ahead.forget()
        self.steps = 0
        self._since = " since join()"
        for reducer in self._reducers.values():
            reducer.nothing_pending = False
            reducer.steps = 0
            reducer.not_finite = {}
            reducer.hooks.doubt_averages()
            if reducer.layout.tuner is not None:  # ranks may have counted passes differently
                reducer.layout.tuner.stop()
            reducer.comparison.restart(self._since)  # a rank that had joined has not stepped
        self._weights.forget()

    def _reports(self, stepping: Reducer | None = None) -> tuple[GradientReport, ...]:
        reports = [self._report(each, stepping) for each in self._reducers.values()]
        return tuple(report for report in reports if report is not None)

    def _report(self, reducer: Reducer, stepping: Reducer | None) -> GradientReport | None:
        pending = reducer.pending(stepping)
        if pending.unready:
            reducer.hooks.refuse_others_pass()
            self._follow_parameters(reducer)
            pending = reducer.pending(stepping)
        return reducer.report(pending, is_stepping=reducer is stepping)

    def _agree(self, reports: tuple[GradientReport, ...], stepping: Reducer | None = None) -> bool:
        """Exchange reports, and reduce the gradients that are due on any rank.

        Returns:
            Whether `stepping` need not wait any more: all ranks are about to step.
        """
        reports = self._weights.added_to(reports, self.number, self._reducers.comparisons())
        report = PassReport(self.steps, reports, gave_up=bool(self.agreement.failure))
        # The earlier report of an interrupted pass, which goes on.
        sent = self.agreement.open_report
        is_special = sent is not None or self._weights.has_differences
        plain, parameters = [], {}
        for index, reducer in self._reducers.items():
            parameters[index] = len(reducer.names)
            reduction = reducer.plain
            if reduction is not None and not is_special:
                plain.append(reduction)
        self._end = end = PassEnd()
        try:
            end.run(self._engine, self.agreement, report, parameters, plain)
        except RingError as error:
            if not end.reports:
                self._raise_explained(error)
            raise
        broken = {}  # the averaged parts that the earlier report has named, and that are gone
        for each in sent.gradients if sent is not None else ():
            found = self._reducers.get(each.optimizer)
            present = 0 if found is None else found.pending(stepping).carried
            if each.carried & ~present:
                broken[each.optimizer] = each.carried & ~present
        is_done = self._conclude(end, broken, stepping)
        if sent is not None:
            for rest in self._reports():  # gradients that the earlier report did not have
                self._note_pending(rest.optimizer)
        return is_done

    def _conclude(
        self, end: PassEnd, broken: Mapping[int, int] | None = None, stepping: Reducer | None = None
    ) -> bool:
        """Reduce the gradients, if they are not reduced yet. See `_agree` and `_reduce`."""
        if end.is_reduced:
            self._note(end.decision)
            self._end = None
            end.raise_interrupt()
        else:
            self._reduce(end, broken or {})
        decision = end.decision
        if decision.has_another_round:
            return self._agree(self._reports(stepping), stepping)
        return decision.is_of_step and not any(
            self._reducers.get(index) is stepping for index in decision.open
        )

    def _raise_explained(self, error: RingError, name: str = "") -> None:
        """Raise the error of an agreement again, with the likely mistake of the program, if any."""
        purpose = f"rank {self._rank}: {in_words(name or backward_name(self.number))}"
        done = f"{self.number} backward pass{'es' if self.number != 1 else ''}{self._since}"
        better = explained(error, purpose, done)
        if better is not None:
            raise better from error

    def _reduce(self, end: PassEnd, broken: Mapping[int, int]) -> None:
        """Reduce the gradients that are due on any rank, and end the agreement.

        Ctrl-C is deferred until then.

        Args:
            end: the reports of all ranks, and what they mean.
            broken: the averaged parts of gradients that this rank's report names, and that the
                program has dropped since, after an interrupt.
        """
        ranks, decision, number = end.reports, end.decision, self.number
        with interrupt_deferred():
            self.agreement.begin_reduction()
            try:
                if decision.given_up:
                    end_given_up(self.agreement.failure, self._engine, backward_name(number))
                require_same_steps(ranks, decision.out_of_step, self._size)
                self._require_promised(decision, broken)
                self._weights.differ(ranks, number)
                self._weights.tell(number)
                self._reducers.reduce(decision, end.own, number, len(ranks))
                self._note(decision)
            except Exception:
                self.agreement.finish()
                raise
            self.agreement.finish()
            if decision.has_another_round:
                for reducer in self._reducers.values():
                    reducer.hooks.take_up_late()

    def _require_promised(self, decision: PassDecision, broken: Mapping[int, int]) -> None:
        """End the job if the ranks count on averaged parts that this rank has dropped since."""
        for each in decision.reductions:
            if broken.get(each.optimizer, 0) & each.carried & ~each.unlike:
                self._engine.end(
                    f"rank {self._rank}: a backward pass was interrupted after this rank had told "
                    "the others which averaged gradients it has, and the program has dropped "
                    "those: call zero_grad() before each backward pass, or end the program after "
                    "an interrupt"
                )

    def _take_note(self) -> None:
        """Take note of the last pass that C++ has reduced, unless this was done.

        Ctrl-C may come between that and this: then the next call does it.
        """
        end = self._end
        if end is not None and end.is_reduced:  # else a call of C++ is under way, or has failed
            self._note(end.decision)
            self._end = None

    def _note(self, decision: PassDecision) -> None:
        """Take note of a decision whose gradients are reduced."""
        reductions, is_of_step, left = decision.reductions, decision.is_of_step, decision.open
        for each in reductions:
            reduced = self._reducers.get(each.optimizer)
            if reduced is None:  # it was dropped after an interrupt
                continue
            if reduced.checks_finite:
                reduced.note_not_finite(each.touched, each.not_finite)
            if is_of_step:
                reduced.comparison.note_averaging_step()
        if reductions or not is_of_step:  # else it was no pass, and no gradient was left over
            is_steady = decision.is_whole and not (left or is_of_step)
            is_planable = is_steady and not any(each.sparse for each in reductions)
            planable = reductions if is_planable else ()
            self.run_ahead.learn({each.optimizer: each.touched for each in planable})
        incomplete = set() if self.run_ahead.is_planned else decision.incomplete
        # A report may mention an accumulating optimizer that is gone here: after a program has
        # dropped it, ranks report it until Python collects garbage.
        mentioned = decision.mentioned
        for index, reducer in self._reducers.items():
            is_mentioned = index in mentioned
            if is_mentioned:
                reducer.nothing_pending = not (index in left or index in incomplete)
            if reducer.elsewhere:
                there = {owner.index for owner in reducer.owners()}
                if there & (left if is_mentioned else mentioned):
                    reducer.nothing_pending = False


def _living_reducers() -> list[Reducer]:
    """Return the reducers of all process sets."""
    world = current.find_world()
    records = () if world is None else world.process_sets.records
    syncs = [record.owned.get(BackwardSync) for record in records]
    return [reducer for sync in syncs if sync for reducer in sync._reducers.living()]


def backward_sync_of(process_set: ProcessSet) -> BackwardSync:
    """Return the synchronisation of all optimizers on a process set. This rank is a member."""
    owned = membership(process_set).owned
    if BackwardSync not in owned:
        owned[BackwardSync] = BackwardSync(process_set)
    sync: BackwardSync = owned[BackwardSync]
    return sync
