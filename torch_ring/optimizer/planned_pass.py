"""RunAhead: backward passes on devices that end without an agreement of the ranks' hosts.

Agreed passes come first: the ranks gather reports of their gradients at the end of each pass, and
then reduce (`BackwardSync`). When the last passes had the same gradients, on whichever ranks, or
went round in a cycle (a GAN), all ranks make the same *plan* after the same pass: which gradients
each of the next passes reduces. In a *planned* pass no host waits:

1. C++ launches each bucket when its gradients are there, in the plan's order; the end of the pass
   launches the rest, with zeros (or the old value) for gradients that this rank does not have.
2. The rank submits a report of the gradients that it really had, for which nobody waits: an
   allgather that all ranks read later.
3. It reads the reports that are complete. It waits only for the one of `AHEAD` passes ago.

**No rank hangs.** Passes are numbered: a rank's next pass with due gradients, or its next step()
without one, is pass N. It launches all of a planned pass before it waits for anything, and waits
only for reports of passes that it has entered: the others need nothing from it to get there.

**No ranks differ.** All that decides what a pass reduces follows from the reports, which are the
same on all ranks. A rank has read the report of pass N before it begins pass N + `AHEAD` + 1. So a
report that needs a change takes effect in that pass, on all ranks, without a word more: that pass
is agreed, and a new plan follows when the passes repeat themselves again. How late a rank was, or
which of two reports it saw first, changes nothing: the same program gives the same bits.

What a rank does when its gradients are not those of the plan:

- It *lacks* some. It waits for the pass's reports. If no rank has had them, ``grad`` is again what
  it was (None, say); else the mean is there.
- It has *extra* ones. It waits for the pass's reports, too. If every rank has extra ones (a layer
  was unfrozen), the ranks reduce these at once, in this pass. If only some have, nobody else could
  know: they keep theirs aside, ``grad`` is as it was before, and they add them to the optimizer's
  gradients in its next agreed pass. The passes are agreed `AHEAD` + 1 passes later at the latest.

If all ranks deviated in a pass, all have read its report before the next one, which can be the
agreed one already. Extra gradients, and gradients that nobody has had in several passes, end the
plan. Each time that a plan ends early, the next one needs twice as many equal passes.

Special cases:

- *A rank without data* enters the pass in step(), as it enters an agreement. It counts as zeros.
- *Accumulation.* When a gradient is due after ``backward_passes_per_step`` passes, a planned pass
  takes all that have begun. Ranks that left gradients for step() in agreed passes make no plan.
- *Weights.* Reports bring digests of them now and then (`WeightReports`). If they differ, the plan
  ends, and the next agreed pass finds out in what.
- *Steps.* Reports have the number of steps. If they differ, every rank raises MismatchError when
  it reads them, and the next agreed pass raises it again. A rank may have left for it meanwhile: a
  pass that fails reads the reports that have come before it says that a rank is missing.
- *join().* The engine tells a joined rank of each report of the others, and it launches zeros for
  that pass (csrc/gradients/run_ahead.h). The others see that it is gone, as of any other change.
- *New optimizers, other process sets, moved models* change the next pass to an agreed one. All
  ranks do these together, between the same passes.
- *Ctrl-C* waits for the end of a planned pass.
- *An exception during backward().* If part of the pass was launched, the next one, or step(), ends
  the job on all ranks. Otherwise that is this pass.
- *A dead rank* ends the world, and so all waits. *shutdown()* waits until the others have entered
  this rank's passes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from torch_ring._C import Due, Engine, GradientHooks, PassAgreement, Work, backward_name
from torch_ring._C import RunAhead as NativeRunAhead
from torch_ring.errors import MismatchError, PeerLostError, RingError
from torch_ring.optimizer.gradient_report import BackwardReport, GradientReport, require_same_steps
from torch_ring.optimizer.participants import Participant, Participants, Pending, interrupt_deferred
from torch_ring.optimizer.weight_reports import WeightReports
from torch_ring.world.join import World

__all__ = ["AHEAD", "Entered", "Gradients", "PassHistory", "RunAhead", "union_of", "without"]

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


T = TypeVar("T")

_PLAN_BYTES = 4  # a digest of the plan comes before each report


@dataclass
class Entered:
    """A planned pass that this rank has entered; not all others may have.

    Attributes:
        number: the pass's.
        planned: the gradients that it reduces.
        report: this rank's.
        encoded: the same, as it was sent.
        has_base: whether gradients were added to others, reduced before.
        work: the allgather of the reports.
    """

    number: int
    planned: Gradients
    report: BackwardReport
    encoded: bytes
    work: Work
    has_base: bool


class PlannedReports:
    """The reports that this rank has sent and not read yet, in the order of passes.

    Thread: the one that runs backward(). Blocking: where said. Errors: RingError.

    Args:
        engine: of the process set.
        explain: raises an error of the operation of this name again, with what its user may have
            done wrong.
    """

    def __init__(self, engine: Engine, explain: Callable[[RingError, str], None]) -> None:
        self._engine = engine
        self._explain = explain
        self._unread: deque[Entered] = deque()

    def send(
        self, number: int, planned: Gradients, report: BackwardReport, has_base: bool
    ) -> Entered:
        """Send this rank's report of a pass to the others. Does not wait for them."""
        plan = zlib.crc32(repr(sorted(planned.items())).encode())
        encoded = plan.to_bytes(_PLAN_BYTES, "little") + report.encode()
        message = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        work = self.explaining(
            number, lambda: self._engine.allgather(message, _name(number), joinable=True)
        )
        entered = Entered(number, planned, report, encoded, work, has_base)
        self._unread.append(entered)
        return entered

    def unread(self, through: int) -> Iterator[tuple[Entered, list[BackwardReport]]]:
        """Yield passes and their reports: those up to pass `through`, and all that are complete."""
        while self._unread and (self._unread[0].number <= through or self._unread[0].work.done()):
            entered = self._unread[0]
            ranks = self.of(entered)
            self._unread.popleft()
            yield entered, ranks

    def explaining(self, number: int, call: Callable[[], T]) -> T:
        """Call an operation of a pass; its errors say what the program may have done wrong."""
        try:
            return call()
        except RingError as error:
            self._explain(error, _name(number))
            raise

    def forget(self) -> None:
        """Leave all reports unread."""
        self._unread.clear()

    def of(self, entered: Entered) -> list[BackwardReport]:
        """Wait for the reports of a pass; return those of all ranks that had not joined."""
        gathered = bytes(self.explaining(entered.number, entered.work.wait).numpy())
        own = entered.encoded
        if gathered == own * (len(gathered) // len(own)):  # the usual case: nothing to decode
            return [entered.report] * (len(gathered) // len(own))
        return _decoded(memoryview(gathered), own[:_PLAN_BYTES])


def _decoded(data: memoryview, plan: bytes) -> list[BackwardReport]:
    ranks = []
    while data:
        if data[:_PLAN_BYTES] != plan:
            raise RingError(
                "the ranks have different plans, which is an error in torch_ring: set "
                "TORCH_RING_RUN_AHEAD=0"
            )
        report, data = BackwardReport.decode(data[_PLAN_BYTES:])
        ranks.append(report)
    return ranks


def _name(number: int) -> str:
    """Return the name of the allgather of a pass's reports."""
    return f"{backward_name(number)}.ahead"


_log = logging.getLogger("torch_ring")

AHEAD = 4
"""Passes that a host may finish before the slowest one begins the first. More delay errors."""

_REPEATS = 2  # of a cycle, before it becomes a plan
_MOST_REPEATS, _LONG_LIVED = 256, 64  # a plan of 64 passes is no sign of a changing program
_TOLERATED = 3  # passes of a plan in which all ranks deviate, before it ends
_NEVER = sys.maxsize


class RunAhead:
    """The planned passes of a process set: of the world, others have none.

    Thread: the one that runs backward(). Blocking: as above says. Errors: RingError.

    Args:
        engine: of the process set.
        agreement: numbers the passes, planned or agreed.
        size: the number of ranks.
        participants: the wrapped optimizers.
        weights: what reports say of their weights.
        explain: raises an error of the operation of this name again, with what its user may have
            done wrong.

    Attributes:
        aside: the optimizers of which gradients were put aside on this rank.
    """

    def __init__(
        self,
        engine: Engine,
        agreement: PassAgreement,
        size: int,
        participants: Participants,
        weights: WeightReports,
        explain: Callable[[RingError, str], None],
    ) -> None:
        self._native = NativeRunAhead(engine)
        self._engine = engine
        self._agreement = agreement
        self._size = size
        self._participants = participants
        self._weights = weights
        self._reports = PlannedReports(engine, explain)
        self._world: World | None = None
        self._history = PassHistory()
        self._repeats = _REPEATS
        self._plan: Sequence[Gradients] = ()
        self._first, self._end = 0, _NEVER  # passes: the plan's first, and the next one's first
        self._open = -1  # the pass for which hooks may launch
        self._tolerated = 0
        self._known_from = 0  # the first pass that the history may have
        self.aside: set[int] = set()
        self._difference: MismatchError | None = None

    @property
    def hooks(self) -> NativeRunAhead | None:
        """The launcher that the hooks of an optimizer need; None: no pass will ever be planned."""
        return None if self._world is None else self._native

    def add(self, optimizer: int, hooks: GradientHooks) -> None:
        """Take note of an optimizer, of whose gradients this rank gives copies once it has joined.

        Other ranks ask for them that have added to those.
        """
        self._native.add(optimizer, hooks)

    @property
    def is_planned(self) -> bool:
        """Whether the next pass is a planned one, as far as all ranks know."""
        return bool(self._plan)

    @property
    def has_launched(self) -> bool:
        """Whether a part of the pass that is under way has been launched."""
        return self._native.has_launched()

    def watch(self, world: World) -> None:
        """Let this object, which is of the world, make plans."""
        self._world = world
        world.on_leave.append(self._await_others)
        world.process_sets.on_change.append(self.stop)

    def ends_pass(self, steps: int, stepping: Participant | None = None) -> bool:
        """End a backward pass, or begin a step, if the pass is planned; return whether it is.

        Args:
            steps: of all optimizers on this rank.
            stepping: the optimizer that is about to step.

        Raises:
            MismatchError: the ranks were in different steps in a pass before.
        """
        try:
            return self._ends_pass(steps, stepping)
        except PeerLostError:  # it may have raised the difference, which this rank has not read yet
            with contextlib.suppress(RingError):
                self.look(-1)
            self._raise_difference()
            raise

    def _ends_pass(self, steps: int, stepping: Participant | None) -> bool:
        number = self._agreement.number
        if not self._plan or self._agreement.is_open:
            return False
        self.look(number - AHEAD - 1)  # goes on where Ctrl-C has ended the wait
        if number >= self._end:
            self._end_plan(number)
            self._raise_difference()  # one that has raised it earlier may have left by now
            return False
        if self._agreement.is_reducing:
            self._engine.end("a backward pass was interrupted while its gradients were launched")
        pending = {
            index: participant.hooks.pending(Due.everything if participant is stepping else Due.now)
            for index, participant in self._participants.items()
        }
        if any(unready for _, _, _, unready, *_ in pending.values()):
            for participant in self._participants.values():
                participant.hooks.refuse_others_pass()
                participant.follow_parameters()
            return False
        self._note_accumulation(pending, {})
        if stepping is None and not any(any(due) for due, *_ in pending.values()):
            return True
        self._open_pass(number)
        gradients, sparse = self._participants.started_gradients(pending)
        with interrupt_deferred():
            self._agreement.begin_reduction()
            ranks = self._run(number, steps, gradients, sparse, stepping)
            self._note_reduction(number, ranks)
            if stepping is not None:
                stepping.nothing_pending = True
            self._note_accumulation(pending, gradients)
            self._agreement.finish()
        # A pass that is not as planned has waited for its reports already.
        self.look(number if gradients != self._planned(number) else number - AHEAD)
        if number + 1 < self._end:
            self._open_pass(number + 1)
        else:
            self._end_plan(number + 1)
        self._raise_difference()
        return True

    def learn(self, number: int, gradients: Gradients) -> None:
        """Take note of an agreed pass, and make a plan if the last passes repeat themselves.

        Args:
            number: the pass's.
            gradients: which any rank had; empty if a plan cannot have such a pass.
        """
        self._history.add({index: bitmap for index, bitmap in gradients.items() if bitmap})
        self._raise_difference()
        plan = self._history.cycle(self._repeats)
        if not plan or not self._is_possible(plan):
            return
        passes = [
            [
                bucket
                for index, touched in sorted(gradients.items())
                for bucket in self._participants[index].planned_buckets(touched)
            ]
            for gradients in plan
        ]
        if not all(passes):
            return
        self._native.set_plan(number + 1, passes)
        self._plan, self._first, self._end, self._tolerated = plan, number + 1, _NEVER, 0
        self._open_pass(number + 1)

    def look(self, through: int = _NEVER) -> None:
        """Read the reports that are complete, and wait for those up to pass `through`."""
        for entered, ranks in self._reports.unread(through):
            self._judge(entered, ranks)

    def stop(self) -> None:
        """Agree on the next pass, and make no plan before the passes have repeated themselves.

        All ranks call it between the same passes.
        """
        number = self._agreement.number
        if self._plan:
            self.look(number - AHEAD - 1)
            if number >= self._end:
                self._end_plan(number)
        self._drop_plan()
        self._history.clear()
        self._known_from = number  # other ranks may not have read all reports before it

    def begin_anew(self) -> None:
        """As stop(): a new optimizer makes what passes did before say less."""
        self.stop()
        self._repeats = _REPEATS

    def forget(self) -> None:
        """Forget all passes: all ranks have joined."""
        self._reports.forget()
        self.begin_anew()
        self._difference = None

    def take_up_aside(self, index: int) -> bool:
        """Add what was put aside to an optimizer's gradients; return whether there was some."""
        if index not in self.aside:
            return False
        self.aside.discard(index)
        self._participants[index].hooks.take_up_aside(again=False)
        return True

    # --- plans

    def _is_possible(self, plan: Sequence[Gradients]) -> bool:
        """Return whether planned passes are possible; all ranks come to the same answer."""
        if self._world is None:
            return False
        others = (record for record in self._world.process_sets.records if record.id != 0)
        if any(len(record.ranks) > 1 for record in others):
            return False  # NCCL needs one order of all communicators
        # Other optimizers may be gone on some ranks only, until Python collects garbage.
        used = {index for gradients in plan for index in gradients}
        found = [self._participants.get(index) for index in used]
        return all(participant is not None and participant.runs_ahead for participant in found)

    def _end_plan(self, number: int) -> None:
        """End the plan before a pass because of what a report said."""
        is_long_lived = number - self._first >= _LONG_LIVED
        self._repeats = _REPEATS if is_long_lived else min(2 * self._repeats, _MOST_REPEATS)
        self._drop_plan()

    def _drop_plan(self) -> None:
        if not self._plan:
            return
        self._plan, self._end, self._open = (), _NEVER, -1
        self._native.close()
        for participant in self._participants.values():
            participant.hooks.expect(None)

    def _planned(self, number: int) -> Gradients:
        return self._plan[(number - self._first) % len(self._plan)]

    def _open_pass(self, number: int) -> None:
        """Let the hooks launch pass `number`."""
        if self._open == number:
            return
        self._open = number
        self._native.open(number)
        planned = self._planned(number)
        for index, participant in self._participants.items():
            participant.hooks.expect(participant.bitmap(planned.get(index, 0)))

    # --- a planned pass

    def _note_accumulation(self, pending: Mapping[int, Pending], taken: Gradients) -> None:
        """Take note of the optimizers that have gradients which this pass does not take."""
        for index, (_, _, accumulating, *_) in pending.items():
            if accumulating and index not in taken:
                self._participants[index].nothing_pending = False

    def _note_reduction(self, number: int, ranks: Sequence[BackwardReport]) -> None:
        """Take note of the optimizers that have nothing left to reduce, on any rank.

        They are those in a report, of which all ranks know: in the plan, or after it failed on all.
        """
        planned = self._planned(number)
        all_deviate = all(rank.due != planned for rank in ranks)
        for index in {report.participant for rank in ranks for report in rank.gradients}:
            participant = self._participants.get(index)
            if participant is not None and (index in planned or all_deviate):
                participant.nothing_pending = True

    def _run(
        self,
        number: int,
        steps: int,
        gradients: Gradients,
        sparse: Gradients,
        stepping: Participant | None,
    ) -> Sequence[BackwardReport]:
        """Launch a pass and report it; return its reports, or this rank's if that is as planned."""
        planned = self._planned(number)
        for index, bitmap in planned.items():
            participant = self._participants.get(index)
            if participant is not None:
                due = gradients.get(index, 0) & bitmap
                participant.hooks.fill(participant.bitmap(bitmap), participant.bitmap(due))
        self._reports.explaining(number, self._native.launch_rest)
        reports = tuple(
            GradientReport(index, gradients.get(index, 0), sparse.get(index, 0))
            for index, participant in self._participants.items()
            if index in gradients or participant is stepping
        )
        reports = self._weights.added_to(reports, number)
        has_base = any(each.hooks.has_base() for each in self._participants.values())
        entered = self._reports.send(number, planned, BackwardReport(steps, reports), has_base)
        self._reports.explaining(number, self._native.wait)
        ranks = [entered.report] if gradients == planned else self._reports.of(entered)
        union = union_of(rank.due for rank in ranks)
        for index, bitmap in planned.items():
            participant = self._participants.get(index)
            if participant is not None:
                nowhere = bitmap & ~union.get(index, 0)
                participant.hooks.restore(participant.bitmap(nowhere))
                participant.hooks.mark_reduced(participant.bitmap(bitmap & ~nowhere))
        if all(without(rank.due, planned) for rank in ranks):
            self._participants.reduce_reported(ranks, without(union, planned), number)
        else:
            self._put_aside(without(gradients, planned))
        return ranks

    def _put_aside(self, extra: Gradients) -> None:
        for index, bitmap in extra.items():
            participant = self._participants[index]
            participant.hooks.put_aside(participant.bitmap(bitmap))
            self.aside.add(index)

    def _judge(self, entered: Entered, ranks: Sequence[BackwardReport]) -> None:
        """Draw the conclusions of a report, which are the same on all ranks."""
        planned = entered.planned
        if entered.has_base and len(ranks) != self._size:
            self._engine.end(
                "a rank has joined, and a planned backward pass has added its gradients to others "
                "that are averaged already, of which that rank has a part: call zero_grad() before "
                "each backward pass, or wrap the optimizer with run_ahead=False"
            )
        found = [rank.due for rank in ranks]
        union = union_of(found)
        all_deviate = all(gradients != planned for gradients in found)
        is_usual = len(ranks) == self._size and not any(
            report.sparse for rank in ranks for report in rank.gradients
        )
        try:
            require_same_steps([rank.steps for rank in ranks], self._size)
        except MismatchError as difference:
            is_usual, self._difference = False, self._difference or difference
        # The next agreed pass gathers what differs in the weights.
        is_usual = not self._weights.differ(ranks, entered.number) and is_usual
        if entered.number >= self._known_from:
            self._history.add(union if is_usual else {})
        self._tolerated += all_deviate
        if not is_usual or without(union, planned) or self._tolerated > _TOLERATED:
            # If all ranks have deviated, all have waited for this report before the next pass.
            self._end = min(self._end, entered.number + (1 if all_deviate else AHEAD + 1))

    def _raise_difference(self) -> None:
        difference, self._difference = self._difference, None
        if difference is not None:
            raise difference

    def _await_others(self) -> None:
        """Before this rank leaves: wait until the others have entered the passes that it has."""
        try:
            self.look()
            self._raise_difference()
        except RingError as error:  # there is no pass any more to raise it
            _log.error("the last backward passes: %s", error)
        finally:
            self._reports.forget()
