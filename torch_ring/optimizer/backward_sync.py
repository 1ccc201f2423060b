"""BackwardSync: after each backward pass the ranks agree which gradients exist, and reduce them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torch_ring._C import (
    DenseFinalizer,
    Engine,
    PassAgreement,
    all_sent,
    backward_name,
    in_words,
)
from torch_ring.errors import MismatchError, RingError
from torch_ring.optimizer.deferred_interrupt import interrupt_deferred
from torch_ring.optimizer.gradient_report import BackwardReport, GradientReport
from torch_ring.optimizer.uneven_batches import explained
from torch_ring.optimizer.weight_comparison import summary_of
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, engine_of, membership
from torch_ring.world.process_set_table import ProcessSetRecord

__all__ = ["BackwardSync", "FastPath", "Participant", "backward_sync_of"]


class FastPath(NamedTuple):
    """The end of a pass in which all gradients of the only optimizer are due on all ranks."""

    finalizer: DenseFinalizer
    report: GradientReport  # which all ranks send then


class Participant(Protocol):
    """One optimizer's side of backward synchronisation (`torch_ring.optimizer.reducer.Reducer`)."""

    nothing_pending: bool
    """Whether the last agreement left nothing to reduce before the step, on any rank."""

    fast_path: FastPath | None
    """The fast path, once the buckets are in their final order and where there is one."""

    weights_compared: bool
    """Whether the ranks have compared their weights since the start, or since join()."""

    steps: int
    """Steps that the optimizer has taken since then."""

    def report(self, everything: bool) -> GradientReport | None:
        """Return which gradients are due here, or with `everything` which exist; None: none."""

    def start(self, touched: int, sparse: int, number: int) -> None:
        """Start to reduce parameters.

        Args:
            touched: those that have a gradient on some rank, as a bitmap.
            sparse: those of them whose gradients are sparse wherever there is one.
            number: the agreement's, a part of the names of the operations.
        """

    def start_bucket(self, bucket: int) -> None:
        """Start to reduce a bucket during the pass."""

    def new_memory(self, bucket: int) -> Tensor:
        """Return other memory for a bucket."""

    def finish(self, order: Sequence[int]) -> None:
        """Wait until they are reduced, then use rank 0's order of readiness, if there is one."""

    def weight_digests(self) -> Tensor:
        """Return a number for the weights of each parameter, int64 on the CPU."""

    def warn_of_difference(self, ranks: Sequence[int], digests: Tensor) -> None:
        """Warn if these digests, int64 [rank, parameter], differ between the ranks."""


@dataclass
class BackwardSync:
    """Backward synchronisation of all wrapped optimizers of this process on one process set.

    A backward pass may touch several optimizers' parameters (GANs), and not the same ones on every
    rank. So each pass ends with one agreement about all of them: a gradient that exists on any rank
    is reduced on all, in the order of the optimizers' indices. The agreement is one allgather, of a
    few bytes an optimizer and a bit a parameter.

    A step must not begin before the gradients of all ranks are reduced. Usually the last pass has
    left no gradient behind on any rank; its agreement has told all of them, and `reduce_pending`
    does nothing. Otherwise (accumulation, a rank that skipped backward) it agrees once more. If
    only this rank has accumulated since, the next agreement finds the ranks in different steps.

    A rank's first gradients for an optimizer travel with a digest of its weights, so that somebody
    who has forgotten broadcast_parameters() hears of it.

    Ranks that have called join() take no part in agreements; reductions count them as zeros.

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
        steps: steps that the optimizers have taken, all together.

    Agreements and steps are counted since the start, or since join().
    """

    process_set: ProcessSet
    engine: Engine = field(init=False)
    size: int = field(init=False)
    agreement: PassAgreement = field(default_factory=PassAgreement)
    steps: int = 0
    _since: str = ""  # how errors say since when
    _rank: int = field(default_factory=current.rank)
    _world_engine: Engine = field(default_factory=current.engine)
    _record: ProcessSetRecord = field(init=False)
    _registered: int = 0
    _participants: WeakValueDictionary[int, Participant] = field(
        default_factory=WeakValueDictionary
    )

    def __post_init__(self) -> None:
        self.engine = engine_of(self.process_set)
        self.size = self.process_set.size()
        self._record = membership(self.process_set)
        if self._record.id == 0:  # no other set can be joined
            current.world().on_rejoin.append(self.resynchronize)

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
        for record in world.process_sets.records:
            sync = record.owned.get(BackwardSync)
            if sync is not None:
                sync.finalize()
        found = world.process_sets.find(self._record.ranks)
        is_synchronised = found is not None and BackwardSync in found.owned
        if not is_synchronised and world.engine is self._world_engine:
            self.finalize()

    @property
    def number(self) -> int:
        """Agreements so far; a part of the names of the operations up to the next one."""
        return self.agreement.number

    def register(self, participant: Participant) -> int:
        """Return the participant's index. Call in the same order on all ranks."""
        index = self._registered
        self._participants[index] = participant
        self._registered += 1
        return index

    def start_bucket(self, participant: int, bucket: int) -> None:
        """Start to reduce a bucket. Called by autograd when all of it is due here."""
        try:
            self._participants[participant].start_bucket(bucket)
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
            if len(self._participants) == 1 and self._finalize_dense(*self._participants.values()):
                return
            reports = self._reports()
            for report in reports:
                # Until they are reduced; under no_sync(), say, only this rank knows of them.
                self._participants[report.participant].nothing_pending = False
            if any(report.due for report in reports):
                self._agree(reports)
        finally:
            self.agreement.stop_ending()

    def _begin_ending(self) -> None:
        """Begin the end of a pass; no gradient may arrive in other threads meanwhile."""
        if not self.agreement.begin_ending():
            self.fail("two threads end backward passes of wrapped optimizers at the same time")

    def _finalize_dense(self, participant: Participant) -> bool:
        """Take the fast path if all gradients are due here; return whether the pass has ended."""
        if participant.fast_path is None or not participant.weights_compared:
            return False
        finalizer, report = participant.fast_path
        own = BackwardReport(self.steps, (report,)).encode()
        number, nothing_pending = self.number, participant.nothing_pending
        participant.nothing_pending = False
        try:
            differing = self.engine.finalize_dense(finalizer, self.agreement, own)
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
        """Reduce whatever a rank has accumulated for `participant`, due or not."""
        if participant.nothing_pending:
            return
        self._begin_ending()
        try:
            while not participant.nothing_pending:
                self._agree(self._reports(stepping=participant))
        finally:
            self.agreement.stop_ending()

    def resynchronize(self) -> None:
        """Reset what the ranks may have counted differently: join() returns on all of them."""
        self.agreement.restart(0)
        self.steps = 0
        self._since = " since join()"
        for participant in self._participants.values():
            participant.nothing_pending = False
            participant.weights_compared = False  # a rank that had joined has not stepped
            participant.steps = 0

    def _reports(self, stepping: Participant | None = None) -> tuple[GradientReport, ...]:
        participants = list(self._participants.values())
        reports = [participant.report(participant is stepping) for participant in participants]
        return tuple(report for report in reports if report)

    def _agree(self, reports: tuple[GradientReport, ...]) -> None:
        """Tell the other ranks, and reduce the gradients that are due on any of them."""
        report = BackwardReport(self.steps, tuple(map(self._with_digest, reports)))
        own = report.encode()
        goes_on = self.agreement.is_open  # with an earlier report, of a pass that was interrupted
        try:
            gathered = self.engine.gather_reports(self.agreement, own)
        except RingError as error:
            self._raise_explained(error)
            raise
        if all_sent(gathered, own):  # the usual case: nothing to decode
            self._reduce_all([report] * (len(gathered) // len(own)))
        else:
            self._reduce_all(list(BackwardReport.decode_all(memoryview(gathered))))
        if goes_on:
            for rest in self._reports():  # of which the earlier report did not know
                self._participants[rest.participant].nothing_pending = False

    def _reduce_all(self, ranks: Sequence[BackwardReport]) -> None:
        """Reduce, and end the agreement; Ctrl-C waits for that."""
        with interrupt_deferred():
            self.agreement.begin_reduction()
            try:
                self._reduce(ranks)
            except Exception:
                self.agreement.finish()
                raise
            self.agreement.finish()

    def _gather(self, message: Tensor, name: str) -> Tensor:
        """Return the messages of all ranks that have not joined, one after the other."""
        return self.engine.allgather(message, name, blocking=True, joinable=True).wait()

    def _raise_explained(self, error: RingError) -> None:
        """Raise the error of an agreement with what its user may have done wrong, if that helps."""
        purpose = f"rank {self._rank}: {in_words(backward_name(self.number))}"
        done = f"{self.number} backward pass{'es' if self.number != 1 else ''}{self._since}"
        better = explained(error, purpose, done)
        if better is not None:
            raise better from error

    def _with_digest(self, report: GradientReport) -> GradientReport:
        """Return the report with a digest of the weights, if these are the first gradients."""
        participant = self._participant(report.participant)
        if participant.weights_compared or not report.due:
            return report
        return replace(report, digest=summary_of(participant.weight_digests()))

    def _compare_weights(self, ranks: Sequence[BackwardReport], number: int) -> None:
        """Compare the weights of each optimizer whose first gradients are due on some rank."""
        digests: dict[int, list[bytes]] = {}
        for report in (report for rank in ranks for report in rank.gradients if report.digest):
            digests.setdefault(report.participant, []).append(report.digest)
        if not digests:
            return
        participants = [self._participant(index) for index in sorted(digests)]
        if any(found != found[:1] * len(ranks) for found in digests.values()):
            # They differ, or a rank has no gradients yet and has sent none.
            self._find_difference(participants, f"{backward_name(number)}.weights")
        for participant in participants:
            participant.weights_compared = True

    def _find_difference(self, participants: Sequence[Participant], name: str) -> None:
        """Warn of each optimizer whose weights differ between the ranks. Collective."""
        digests = [participant.weight_digests() for participant in participants]
        own = torch.cat([torch.tensor([current.rank()], device="cpu"), *digests])
        rows = self._gather(own, name).view(-1, len(own))
        ranks, *parts = torch.split(rows, [1, *map(len, digests)], dim=1)
        for participant, part in zip(participants, parts, strict=True):
            participant.warn_of_difference(ranks.flatten().tolist(), part)

    def _reduce(self, ranks: Sequence[BackwardReport]) -> None:
        """Reduce the gradients that are due on any rank, by the reports of all of them."""
        number = self.number
        self._check_steps([rank.steps for rank in ranks])
        self._compare_weights(ranks, number)
        touched: dict[int, int] = {}
        dense: dict[int, int] = {}
        for report in (report for rank in ranks for report in rank.gradients):
            index = report.participant
            touched[index] = touched.get(index, 0) | report.due
            dense[index] = dense.get(index, 0) | report.due & ~report.sparse
        accumulating = {r.participant for rank in ranks for r in rank.gradients if r.accumulating}
        # A rank that has joined does not hear of an order, and must keep the same plan.
        everybody = len(ranks) == self.size
        orders = {r.participant: r.order for r in ranks[0].gradients} if everybody else {}
        participants = [(index, self._participant(index)) for index in sorted(touched)]
        for index, participant in participants:
            participant.start(touched[index], touched[index] & ~dense[index], number)
        for index, participant in participants:
            participant.finish(orders.get(index, ()))
            participant.nothing_pending = index not in accumulating

    def _check_steps(self, steps: Sequence[int]) -> None:
        who = "rank" if len(steps) == self.size else "of the ranks that have not joined, number"
        for rank, other in enumerate(steps):
            if other != steps[0]:
                raise MismatchError(
                    f"the ranks are in different steps: {who} 0 has taken {steps[0]} optimizer "
                    f"steps, {who} {rank} {other}. Every rank must call step() equally often, and "
                    "backward() equally often between two steps (a rank without data may leave "
                    "it out). If an exception like KeyboardInterrupt was caught on a rank, it may "
                    "have left a step out, and its weights differ: call shutdown() and init(), and "
                    "go on from a checkpoint"
                )

    def _participant(self, index: int) -> Participant:
        participant = self._participants.get(index)
        if participant is None:
            raise RingError(
                f"another rank has gradients for the wrapped optimizer {index}, which does "
                "not exist here (any more): wrap and drop optimizers alike on all ranks"
            )
        return participant


def backward_sync_of(process_set: ProcessSet) -> BackwardSync:
    """Return the synchronisation of all optimizers on a process set. This rank is a member."""
    owned = membership(process_set).owned
    if BackwardSync not in owned:
        owned[BackwardSync] = BackwardSync(process_set)
    sync: BackwardSync = owned[BackwardSync]
    return sync
