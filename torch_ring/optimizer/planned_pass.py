# SPDX-License-Identifier: Apache-2.0
"""PlannedPasses: backward passes on devices that end without an agreement of the ranks' hosts.

The plan is the set of gradients that any rank had in the last agreed pass, if that pass has
repeated the one before. In a *planned* pass no host waits for another host's part of it:

1. C++ launches each bucket when its gradients are ready, in the plan's order; the end of the pass
   launches the rest, with zeros for gradients that this rank does not have.
2. The rank sends a report of the gradients that it really had: an allgather that all read later.
3. It reads the reports of the pass *before*. If the gradients of all ranks together were those of
   the plan, the plan continues. Otherwise it has ended: the ranks read this pass's reports, too,
   and agree on the next pass.

**No rank hangs.** Passes are numbered: a rank's next pass with due gradients, or its next step()
without one, is pass N. It launches all of a planned pass and sends its report before any wait, and
waits only for reports of passes that it has entered. A host is at most one pass ahead of the
slowest one.

**No ranks differ.** The choice between planned and agreed passes depends on the reports alone,
which are the same on all ranks, and not on the time when a rank reads them: a pass is agreed if the
reports of the pass two before it have ended the plan, or if *every* rank had other gradients than
planned in the pass before it, since then all ranks have read those reports at once. The same
program gives the same bits.

A rank whose gradients are not those of the plan waits for the others' reports of that pass:

- It *lacks* some. If no rank has had them, ``grad`` is restored (to None, for example), so that no
  weight moves by momentum or decay; otherwise ``grad`` gets the mean.
- It has *extra* ones. If every rank's gradients differ from the plan (a layer was unfrozen, another
  network has its turn), all know, and reduce the rest at once, in this pass. If a rank has exactly
  those of the plan, that rank goes on without waiting, and the rest cannot be averaged any more:
  the job ends on all ranks, with an error that names the gradient.

Special cases:

- *A rank without data* enters the pass in step(), as it enters an agreement. It counts as zeros.
- *A gradient that the program sets itself* in place of a planned one counts in the pass. Another
  one, or one that it sets after the pass, makes the step a pass, in the same way.
  If only one rank does so, the ranks are in different steps.
- *Accumulation.* When a gradient is due after ``backward_passes_per_step`` passes, a planned pass
  takes all gradients that have begun. Agreed passes that leave gradients for step() make no plan.
- *Steps* and digests of *weights* are in the reports, too. If steps differ, every rank raises
  MismatchError when it reads the reports, and so does the next agreed pass. A failing pass first
  reads the reports that have arrived, before it blames a missing rank. If weights differ, the next
  agreed pass gathers the details.
- *A gradient that is added to an averaged one* is sent alone. The averaged part must be there on
  all ranks or on none: a rank that has added to one waits for the others' reports of that pass, and
  if they show otherwise, the job ends before its step.
- *join().* The engine tells a joined rank of each report of the others, and it launches zeros for
  that pass (csrc/gradients/run_ahead.h). The others notice its absence in the reports, as they do
  any other change.
- *New optimizers, other process sets, moved models* end the plan on all ranks between the same
  passes. The hooks refuse a changed dtype.
- *Ctrl-C* takes effect after the launches of a planned pass; it interrupts the wait for the reports
  of the pass before.
- *An exception during backward()*, from which the program goes on. If part of the pass was
  launched, the next pass, or step(), ends the job. Otherwise its report says so, and this rank
  reads the others': it ends the job unless all ranks say the same.
- *A dead rank* ends the world, and so all waits. *shutdown()* waits until the others have entered
  this rank's passes.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from torch_ring._C import (
    Due,
    Engine,
    GradientReport,
    PassAgreement,
    PassDecision,
    PassReport,
    Pending,
    RunAhead,
    Work,
    backward_name,
    decide,
)
from torch_ring.errors import MismatchError, PeerLostError, RingError
from torch_ring.optimizer.gradient_report import end_given_up, rank_word, require_same_steps
from torch_ring.optimizer.reducer import Reducer, Reducers
from torch_ring.optimizer.weight_comparison import WeightReports
from torch_ring.world.engine import interrupt_deferred
from torch_ring.world.join import World

__all__ = ["Gradients", "PlannedPasses", "without"]

Gradients = Mapping[int, int]
"""The gradients of one pass: a bitmap of parameters for each optimizer."""

T = TypeVar("T")

_log = logging.getLogger("torch_ring")

_SET_ALONE = (
    "If the program has set a gradient itself before step(), it must do so on all ranks, or wrap "
    "the optimizer with run_ahead=False"
)


def without(gradients: Gradients, planned: Gradients) -> dict[int, int]:
    """Return the gradients that are not planned."""
    rest = {index: bitmap & ~planned.get(index, 0) for index, bitmap in gradients.items()}
    return {index: bitmap for index, bitmap in rest.items() if bitmap}


@dataclass
class Started:
    """The gradients of one optimizer that a planned pass takes, as bitmaps.

    Attributes:
        due: all of them.
        sparse: those that are sparse.
        carried: those with an averaged part, also of the plan's others.
        unsure: those whose averaged part may not be that of other ranks.
    """

    due: int = 0
    sparse: int = 0
    carried: int = 0
    unsure: int = 0

    @classmethod
    def of(cls, pending: Pending) -> Started:
        return cls(pending.due, pending.sparse, pending.carried, pending.unsure)


@dataclass
class Entered:
    """A planned pass that this rank has entered; others may not have entered it yet.

    Attributes:
        number: the number of the pass.
        report: this rank's report.
        work: the allgather of the reports.
        ranks: the reports of all ranks that had not joined; empty until they are read.
        decision: what these reports mean; None until they are read.
        ends_plan: whether the reports end the plan; None until they are judged.
    """

    number: int
    report: PassReport
    work: Work
    ranks: Sequence[PassReport] = ()
    decision: PassDecision | None = None
    ends_plan: bool | None = None


class PlannedPasses:
    """The planned passes of the global process set; other sets have none.

    Thread: the one that runs backward(). Blocking: see the module's docstring. Errors: RingError.

    Args:
        engine: the engine of the process set.
        agreement: numbers the passes, planned or agreed.
        size: the number of ranks.
        reducers: the reducers of the wrapped optimizers.
        weights: the digests of weights in the reports.
        explain: raises the error of a named operation again, with the likely mistake of the
            program.
    """

    def __init__(
        self,
        engine: Engine,
        agreement: PassAgreement,
        size: int,
        reducers: Reducers,
        weights: WeightReports,
        explain: Callable[[RingError, str], None],
    ) -> None:
        self._native = RunAhead(engine)
        self._engine = engine
        self._agreement = agreement
        self._size = size
        self._reducers = reducers
        self._weights = weights
        self._explain = explain
        self._world: World | None = None
        self._agreed: Gradients = {}  # the last agreed pass
        self._plan: Gradients = {}
        self._was_planned = False  # whether the last pass was a planned one
        self._passes: list[Entered] = []  # the last two planned passes
        self._is_concluded = True  # whether the kind of the next pass is decided
        self._difference: MismatchError | None = None

    @property
    def hooks(self) -> RunAhead | None:
        """The launcher for the hooks of an optimizer; None: no pass will ever be planned."""
        return None if self._world is None else self._native

    @property
    def is_planned(self) -> bool:
        """Whether the next pass is a planned one, as all ranks know it now."""
        return bool(self._plan)

    @property
    def may_have_missed(self) -> bool:
        """Whether the last pass may have left gradients that the program has set."""
        return self.is_planned or self._was_planned

    @property
    def has_launched(self) -> bool:
        """Whether a part of the present pass has been launched."""
        return self._native.has_launched()

    def watch(self, world: World) -> None:
        """Enable plans: this object belongs to the global process set."""
        self._world = world
        world.on_leave.append(self._await_others)
        world.on_absence.append(self.stop)
        world.process_sets.on_change.append(self.stop)

    # --- the plan

    def learn(self, gradients: Gradients) -> None:
        """Take note of an agreed pass, and make it the plan if it repeats the one before.

        Args:
            gradients: the gradients that any rank had; empty if such a pass cannot be planned.
        """
        gradients = without(gradients, {})
        self._was_planned = False
        is_repeated = gradients == self._agreed
        self._agreed = gradients
        if not gradients or not is_repeated or not self._is_possible(gradients):
            return
        buckets = [
            bucket
            for index, touched in sorted(gradients.items())
            for bucket in self._reducers[index].planned_buckets(touched)
        ]
        if not buckets:
            return
        self._native.set_plan(buckets)
        self._native.open()
        self._plan = gradients
        for index, reducer in self._reducers.items():
            reducer.hooks.expect(gradients.get(index, 0))

    def _is_possible(self, gradients: Gradients) -> bool:
        """Return whether planned passes are possible, the same on all ranks."""
        if self._world is None or self._size == 1:
            return False
        others = (record for record in self._world.process_sets.records if record.id != 0)
        if any(len(record.ranks) > 1 for record in others):
            return False  # NCCL needs one order of all communicators
        # Other optimizers may be gone on some ranks only, until Python collects garbage.
        used = [self._reducers.get(index) for index in gradients]
        return all(reducer is not None and reducer.runs_ahead for reducer in used)

    def stop(self) -> None:
        """Agree on the next pass, and make no plan before passes have repeated.

        All ranks call it between the same passes.
        """
        for entered in self._passes:
            self._judge(entered)
        self._difference = None  # the next agreed pass raises it
        self._drop_plan()

    def forget(self) -> None:
        """Forget all passes: all ranks have joined."""
        self._passes.clear()
        self.stop()

    def _drop_plan(self) -> None:
        self._passes.clear()
        self._is_concluded = True
        self._agreed = {}
        if not self._plan:
            return
        self._plan = {}
        self._native.set_plan([])
        for reducer in self._reducers.values():
            reducer.hooks.expect(None)

    # --- a planned pass

    def ends_pass(self, steps: int, stepping: Reducer | None = None) -> bool:
        """End a backward pass, or begin a step, if the pass is planned; return whether it is.

        Args:
            steps: the total number of steps of all optimizers on this rank.
            stepping: the optimizer that is about to step.

        Raises:
            MismatchError: the ranks were in different steps in a pass before.
        """
        if self._agreement.is_open:
            return False
        try:
            self._conclude()  # continues a wait that Ctrl-C has interrupted
            is_planned = bool(self._plan) and self._ends_pass(steps, stepping)
            self._conclude()
        except MismatchError:
            raise
        except RingError as error:
            for reducer in self._reducers.values():  # step() must not use this pass's gradients
                reducer.nothing_pending = False
            if isinstance(error, PeerLostError):  # unread reports may show a MismatchError there
                with contextlib.suppress(RingError):
                    for entered in self._passes:
                        if entered.work.done():
                            self._judge(entered)
                self._raise_difference()
            raise
        return is_planned

    def _ends_pass(self, steps: int, stepping: Reducer | None) -> bool:
        if self._agreement.is_reducing:
            self._engine.end("a backward pass was interrupted while its gradients were launched")
        pending = {index: reducer.pending(stepping) for index, reducer in self._reducers.items()}
        if any(each.unready for each in pending.values()):
            return False  # an agreement follows: parameters have moved, or the pass is refused
        self._note_accumulation(pending, {})
        if stepping is None and not any(each.due for each in pending.values()):
            return True
        started = self._started_gradients(pending, stepping)
        gradients = {index: each.due for index, each in started.items()}
        with interrupt_deferred():
            self._agreement.begin_reduction()
            self._run(self._agreement.number, steps, started, gradients, stepping)
            if stepping is not None:
                stepping.nothing_pending = True
                if any(gradients.values()):
                    stepping.comparison.note_averaging_step()
            self._note_accumulation(pending, gradients)
            self._agreement.finish()
        return True

    def _started_gradients(
        self, pending: Mapping[int, Pending], stepping: Reducer | None
    ) -> dict[int, Started]:
        """Return the gradients by optimizer that a planned pass takes: due or accumulating ones.

        Args:
            pending: the result of `Reducer.pending()` for each optimizer.
            stepping: the optimizer that is about to step.
        """
        found = {}
        for index, each in pending.items():
            started = each
            if each.accumulating:
                started = self._reducers[index].pending(stepping, Due.begun)
            if started.due:
                found[index] = Started.of(started)
        for index, planned in self._plan.items():  # those that the program has set count, too
            lacking = planned & ~(found[index].due if index in found else 0)
            reducer = self._reducers.get(index)
            lacking &= ~(pending[index].carried if index in pending else 0)  # a changed average
            for parameter in reducer.hooks.set_by_hand() if lacking and reducer else ():
                if lacking >> parameter & 1:
                    found.setdefault(index, Started()).due |= 1 << parameter
        return found

    def _run(
        self,
        number: int,
        steps: int,
        started: dict[int, Started],
        gradients: Gradients,
        stepping: Reducer | None,
    ) -> None:
        """Launch a pass and report it.

        Read the reports at once if it is not as planned, or has added to averaged gradients.
        """
        planned = self._plan
        self._was_planned = True
        for index, bitmap in planned.items():
            reducer = self._reducers.get(index)
            if reducer is not None:
                averaged = reducer.fill(bitmap, gradients.get(index, 0) & bitmap)
                if averaged:
                    started.setdefault(index, Started()).carried |= averaged
        self._explaining(number, self._native.launch_rest)
        reports = tuple(
            GradientReport(
                index, **vars(started.get(index, Started())), stepping=reducer is stepping
            )
            for index, reducer in self._reducers.items()
            if index in started or reducer is stepping
        )
        reports = self._weights.added_to(reports, number, self._reducers.comparisons())
        entered = self._send(number, steps, reports)
        if entered.report.gave_up:
            self._read(entered)
        self._explaining(number, self._native.wait)
        is_exact = gradients == planned
        adds = any(each.due & each.carried for each in started.values())
        runs_ahead = is_exact and not adds
        decision = decide([entered.report], 1, {}) if runs_ahead else self._read(entered)
        found = {each.optimizer: each for each in decision.reductions}
        for index, bitmap in planned.items():
            reducer = self._reducers.get(index)
            if reducer is not None:
                of_any = found[index].touched & bitmap if index in found else 0
                stays = found[index].carried if index in found else 0
                reducer.hooks.restore(bitmap & ~of_any)
                reducer.hooks.drop_averaged(of_any & ~gradients.get(index, 0) & ~stays)
                reducer.hooks.mark_reduced(of_any)
        all_know = not is_exact and self._all_deviate(entered.ranks)
        if all_know:
            self._reducers.reduce(decision, gradients, number, len(entered.ranks), planned)
        for index in decision.mentioned:
            reducer = self._reducers.get(index)
            if reducer is not None and (all_know or index in planned):
                reducer.nothing_pending = True

    def _send(self, number: int, steps: int, gradients: Sequence[GradientReport]) -> Entered:
        """Send this rank's report of a pass to the others. Does not wait for them."""
        gave_up = bool(self._agreement.failure)
        plan = zlib.crc32(repr(sorted(self._plan.items())).encode()) or 1  # 0: not planned
        report = PassReport(steps, gradients, gave_up=gave_up, plan=plan)
        message = torch.frombuffer(bytearray(report.encode()), dtype=torch.uint8)
        work = self._explaining(
            number,
            lambda: self._engine.submit("allgather", message, None, _name(number), joinable=True),
        )
        entered = Entered(number, report, work)
        self._passes = [*self._passes[-1:], entered]
        self._is_concluded = False
        return entered

    def _explaining(self, number: int, call: Callable[[], T]) -> T:
        """Call an operation of a pass; add the likely mistake of the program to its errors."""
        try:
            return call()
        except RingError as error:
            self._explain(error, _name(number))
            raise

    def _note_accumulation(self, pending: Mapping[int, Pending], taken: Gradients) -> None:
        """Take note of the optimizers that keep gradients for a later pass."""
        for index, each in pending.items():
            if each.accumulating and index not in taken:
                self._reducers[index].nothing_pending = False

    # --- the reports

    def _read(self, entered: Entered) -> PassDecision:
        """Wait for the reports of a pass; return what those of all ranks mean."""
        if entered.decision is None:
            gathered = self._explaining(entered.number, entered.work.wait)
            ranks = PassReport.decode_all(gathered.numpy().tobytes())
            if any(rank.plan != entered.report.plan for rank in ranks):
                raise RingError(
                    "the ranks have different plans, which is an error in torch_ring: set "
                    "TORCH_RING_RUN_AHEAD=0"
                )
            decision = decide(ranks, self._size, {})
            entered.ranks, entered.decision = ranks, decision
            if decision.given_up:
                failure = self._agreement.failure if entered.report.gave_up else ""
                end_given_up(failure, self._engine, _name(entered.number))
            if decision.out_of_step is None:
                if not self._all_deviate(ranks):
                    self._require_planned(ranks)
                self._require_carried_alike(ranks, decision)
        return entered.decision

    def _require_planned(self, ranks: Sequence[PassReport]) -> None:
        """End the job if a rank has a gradient that is not planned, and another one is ahead."""
        for number, rank in enumerate(ranks):
            extra = without(rank.due, self._plan)
            if not extra:
                continue
            index, bitmap = min(extra.items())
            first = self._reducers.named(index).names[(bitmap & -bitmap).bit_length() - 1]
            others = sum(bitmap.bit_count() for bitmap in extra.values()) - 1
            more = f" and {others} other parameter{'s' if others > 1 else ''}" if others else ""
            who = rank_word(ranks, self._size)
            ahead = next(n for n, other in enumerate(ranks) if other.due == self._plan)
            self._engine.end(
                f"{who} {number} has a gradient of '{first}'{more}, which the passes before did "
                f"not have, and which {who} {ahead} does not have. Hosts run ahead, so that rank "
                "has stepped without it: wrap the optimizer with run_ahead=False (or set "
                "TORCH_RING_RUN_AHEAD=0) where ranks use different parts of a model"
            )

    def _require_carried_alike(self, ranks: Sequence[PassReport], decision: PassDecision) -> None:
        """End the job if ranks have added a planned gradient to averaged ones that may differ."""
        for each in decision.reductions:
            unlike = each.unlike & self._plan.get(each.optimizer, 0)
            if not unlike:
                continue
            bit = unlike & -unlike
            name = self._reducers.named(each.optimizer).names[bit.bit_length() - 1]
            reports = [
                next((own for own in rank.gradients if own.optimizer == each.optimizer), None)
                for rank in ranks
            ]
            adds = next(n for n, own in enumerate(reports) if own and own.due & own.carried & bit)
            lacks = next(
                n for n, own in enumerate(reports) if not (own and own.carried & ~own.unsure & bit)
            )
            who = rank_word(ranks, self._size)
            self._engine.end(
                f"{who} {adds} has added the gradient of '{name}' to one that was averaged before, "
                f"which {who} {lacks} does not have. Hosts run ahead, so ranks would step "
                "with different gradients: call zero_grad() on all ranks in each step, also on one "
                "without data, or wrap the optimizer with run_ahead=False (or set "
                "TORCH_RING_RUN_AHEAD=0)"
            )

    def _all_deviate(self, ranks: Sequence[PassReport]) -> bool:
        """Return whether no rank had the planned gradients; then all have read the reports."""
        return all(rank.due != self._plan for rank in ranks)

    def _conclude(self) -> None:
        """Decide whether the next pass is planned, by the reports of the passes before."""
        if self._is_concluded:
            return
        *before, last = self._passes
        ends = any(self._judge(entered) for entered in before)
        if ends or last.report.due != self._plan:  # then the last reports count, too
            ends = (self._judge(last) and self._all_deviate(last.ranks)) or ends
        self._is_concluded = True
        if ends:
            self._drop_plan()
        else:
            self._native.open()
        self._raise_difference()

    def _judge(self, entered: Entered) -> bool:
        """Return whether the reports of a pass end the plan, the same on all ranks."""
        if entered.ends_plan is not None:
            return entered.ends_plan
        decision, ranks = self._read(entered), entered.ranks
        is_planned = {each.optimizer: each.touched for each in decision.reductions} == self._plan
        is_dense = not any(report.sparse for rank in ranks for report in rank.gradients)
        # The next agreed pass gathers the differing weights.
        are_same = not self._weights.differ(ranks, entered.number)
        entered.ends_plan = not (is_planned and is_dense and are_same and decision.is_whole)
        try:
            require_same_steps(ranks, decision.out_of_step, self._size)
        except MismatchError as difference:
            entered.ends_plan = True
            if any(rank.is_of_step for rank in ranks):
                difference = MismatchError(f"{difference}. {_SET_ALONE}")
            self._difference = self._difference or difference
        return entered.ends_plan

    def _raise_difference(self) -> None:
        difference, self._difference = self._difference, None
        if difference is not None:
            raise difference

    def _await_others(self) -> None:
        """Before this rank leaves: wait until the others have entered its last passes."""
        try:
            for entered in self._passes:
                self._judge(entered)
            self._raise_difference()
        except RingError as error:  # no later pass can raise it
            _log.error("the last backward passes: %s", error)
        finally:
            self._passes.clear()


def _name(number: int) -> str:
    """Return the name of the allgather of a pass's reports."""
    return f"{backward_name(number)}.ahead"
