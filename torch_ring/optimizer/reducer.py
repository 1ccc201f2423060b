# SPDX-License-Identifier: Apache-2.0
"""Reducer: keeps the gradients of one optimizer in buckets, and averages them over the ranks.

`Reducers` holds those of a process set. `BackwardSync` makes them, and starts the reductions.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from torch_ring._C import (
    Due,
    GradientHooks,
    GradientReport,
    NotFinite,
    PassAgreement,
    PassDecision,
    Pending,
    PlainReduction,
    PlannedBucket,
    RunAhead,
    bucket_name,
)
from torch_ring.collectives.reduce_op import Sum
from torch_ring.collectives.sparse import SparseHandle, start_sparse_sum
from torch_ring.compression import Compression
from torch_ring.errors import NonFiniteGradientError
from torch_ring.optimizer.bucket_layout import BucketLayout
from torch_ring.optimizer.bucket_wire import (
    FinishStage,
    ReductionSettings,
)
from torch_ring.optimizer.gradient_report import (
    culprit,
    refuse_ddp,
    warn_of_one_graph,
)
from torch_ring.optimizer.weight_comparison import WeightComparison
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, engine_of

__all__ = ["Reducer", "Reducers", "weakly"]

T = TypeVar("T")

_log = logging.getLogger("torch_ring")

_wrapped = itertools.count()  # the reducers of this process


class Reducer:
    """Keeps the gradients of one optimizer's parameters in buckets, and reduces those.

    In a bitmap of parameters, as an int, bit i is parameter i.

    Thread: the one that runs backward(); `start_bucket` any of autograd's. Errors: ValueError for a
    parameter that cannot be reduced.

    Args:
        process_set: the ranks.
        index: the index of the optimizer on the process set.
        agreement: numbers the passes.
        parameters: leaves, whether they require grad now or not.
        names: the parameters' names in errors.
        settings: how to reduce the gradients.
        groups: indices of parameters whose gradients stay together (`plan_buckets`).
        on_backward_end: ends a backward pass.
        on_bucket_full: starts to reduce the bucket of the given index during the pass.
        run_ahead: launches the buckets of planned passes; None: there will be no planned passes.

    Attributes:
        nothing_pending: whether the ranks have nothing to agree on before the step.
        plain: reduces the gradients without Python, if they are neither compressed nor sent during
            the pass; None: they are, or the buckets do not have their final order yet.
        comparison: the comparison of the ranks' weights.
        steps: the optimizer's steps since the start, or since join().
        not_finite: the non-finite gradients that went into averages of this step, by parameter, if
            the ranks check them.
        hooks: the hooks of the parameters.
        layout: the buckets.
        elsewhere: the parameters whose slot an optimizer has that was wrapped later: its reducer,
            which lives as long as this one, and their index there.
    """

    def __init__(
        self,
        process_set: ProcessSet,
        index: int,
        agreement: PassAgreement,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        settings: ReductionSettings,
        groups: Sequence[Sequence[int]],
        *,
        on_backward_end: Callable[[], None],
        on_bucket_full: Callable[[int], None],
        run_ahead: RunAhead | None,
    ) -> None:
        self._process_set = process_set
        self._wrapped = next(_wrapped)
        self.elsewhere: dict[int, tuple[Reducer, int]] = {}
        self.index = index
        self._agreement = agreement
        self._engine = engine_of(process_set)
        self._rank = current.rank()
        self._size = process_set.size()
        self._parameters = parameters
        self.names = names
        self._settings = settings
        # Its checks come before the hooks: a refused optimizer must leave no trace.
        self.layout = BucketLayout(self._engine, self._size, parameters, names, settings, groups)
        self.nothing_pending = False
        self.steps = 0
        self.not_finite: dict[int, list[NotFinite]] = {}
        self._steps_alone = False  # whether the present step uses gradients of this rank alone
        self.plain: PlainReduction | None = None
        self.owner: weakref.ref[object] | None = None  # the optimizer; its end removes this reducer
        named_weights = dict(zip(parameters, names, strict=True))
        self.comparison = WeightComparison(named_weights, process_set)
        self.hooks = GradientHooks(
            parameters,
            names,
            on_backward_end=on_backward_end,
            on_bucket_full=on_bucket_full,
            new_memory=weakly(self.layout.new_memory),
            fail=self._engine.end,
            blocks=self.layout.blocks,
            agreement=agreement,
            run_ahead=run_ahead,
            sums=settings.op == Sum,
            largest=settings.largest,
        )
        self._started: dict[int, list[FinishStage]] = {}  # whole buckets, sent during the pass
        self._unfinished: list[FinishStage] = []
        self._touched = 0  # parameters that are now reduced in buckets
        self._sparse = 0  # those of them whose gradients become sparse again afterwards
        self._sparse_sums: dict[int, SparseHandle] = {}
        self.layout.attach(self.hooks)
        current.disable_in_child(self.hooks)

    @staticmethod
    def assign_slots(reducers: Iterable[Reducer]) -> None:
        """Give each parameter's slot to the optimizer that was wrapped last.

        Args:
            reducers: all of this process.

        Raises:
            ValueError: in the middle of a backward pass of one of them.
        """
        ordered = sorted(reducers, key=lambda each: each._wrapped)
        last = {p: (each, index) for each in ordered for index, p in enumerate(each._parameters)}
        for each in ordered:
            slots = {index: last[p] for index, p in enumerate(each._parameters)}
            slots = {index: slot for index, slot in slots.items() if slot[0] is not each}
            if not slots:
                continue
            new = [(i, owner) for i, (owner, _) in slots.items() if owner not in each.owners()]
            each.hooks.set_elsewhere({i: (owner.hooks, j) for i, (owner, j) in slots.items()})
            each.elsewhere = slots
            each._warn_of_settings(new)

    def _warn_of_settings(self, slots: Sequence[tuple[int, Reducer]]) -> None:
        """Warn on rank 0 if the last wrapped optimizer has other settings for a parameter."""
        mine = self._settings.describe()
        others = [(self.names[i], owner._settings.describe()) for i, owner in slots]
        differing = [(name, theirs) for name, theirs in others if theirs != mine]
        if differing and self._rank == 0:
            name, theirs = differing[0]
            more = len(differing) - 1
            _log.warning(
                "two optimizers have wrapped '%s'%s with different settings: its gradient is "
                "reduced once, by those of the later one (%s), not by %s",
                name,
                f" and {more} other parameter{'s' if more > 1 else ''}" if more else "",
                theirs,
                mine,
            )

    def owners(self) -> set[Reducer]:
        """Return the reducers that have slots of this one's parameters."""
        return {owner for owner, _ in self.elsewhere.values()}

    def require_slots_on_set(self) -> None:
        """End the job if another process set reduces a parameter of a step that is about to begin.

        Raises:
            RingError: on all ranks; names the parameter.
        """
        for index, (owner, _) in self.elsewhere.items():
            if owner._engine is not self._engine:
                self._engine.end(
                    f"rank {self._rank}: '{self.names[index]}' is averaged over ranks "
                    f"{_ranks(owner._process_set)}, as an optimizer wanted that was wrapped later, "
                    f"and the one that steps now wants ranks {_ranks(self._process_set)}: wrap a "
                    "parameter for one process set, or make and wrap a new optimizer"
                )

    def finish_step(self) -> None:
        """Begin the next step, of which nothing is reduced yet."""
        self.steps += 1
        self.nothing_pending = False
        self.not_finite = {}
        self.hooks.reset(gradients=False)
        is_alone, self._steps_alone = self._steps_alone, False
        self.comparison.step_ended(self.steps, self._agreement.number, is_alone=is_alone)

    def begin_unreduced_step(self) -> None:
        """Note whether this step uses gradients of this rank alone.

        The weights after such a step (in local SGD, for example) are not compared.
        """
        if self.comparison.is_due(self.steps + 1):
            pending = self.hooks.pending(Due.everything)
            is_open = bool(self.elsewhere) and not pending.complete
            self._steps_alone = pending.accumulating or pending.due != 0 or is_open

    def reduce_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of all ranks, reduced as the gradients are."""
        reduced = loss.detach().clone()
        name = f"gradients.{self.index}.{self._agreement.number}.loss"
        op = self._settings.op
        return self._engine.run("allreduce", reduced, reduced, name, -1, op)

    def pending(self, stepping: Reducer | None, which: Due = Due.now) -> Pending:
        """Return the gradients that are due or accumulating.

        Args:
            stepping: the optimizer that is about to step, if any: all its gradients are due.
            which: the others that are due.
        """
        if stepping is self:
            return self.hooks.pending(Due.everything)
        return self.hooks.pending(which, stepping.hooks if stepping else None)

    def report(self, pending: Pending, *, is_stepping: bool) -> GradientReport | None:
        """Return the report of this rank's gradients; None: there is nothing to report.

        Args:
            pending: the present result of `hooks.pending()`.
            is_stepping: whether the optimizer is about to step; then `pending` has everything.
        """
        if not (pending.any or is_stepping):
            return None
        return self.hooks.report(
            pending,
            self.index,
            is_stepping=is_stepping,
            orders=not self.layout.has_order,
            rank=self._rank,
        )

    def note_not_finite(self, touched: int, found: Sequence[NotFinite]) -> None:
        """Take note of non-finite gradients that are about to be reduced.

        Args:
            touched: the parameters that are about to be reduced, as a bitmap.
            found: their non-finite gradients, of all ranks.
        """
        added_to = {each.parameter for each in found if each.carries}
        self.not_finite = {
            parameter: before
            for parameter, before in self.not_finite.items()
            if not touched >> parameter & 1 or parameter in added_to
        }
        known = frozenset(self.not_finite)
        for each in found:
            if each.parameter not in known:
                self.not_finite.setdefault(each.parameter, []).append(each)

    def require_finite(self) -> None:
        """Raise, on all ranks alike, if an averaged gradient of this step is not finite.

        Raises:
            NonFiniteGradientError: one is not finite; names the first in the order of backward, and
                the ranks with the cause.
        """
        found = dict(self.not_finite)
        for index, (owner, there) in self.elsewhere.items():
            if there in owner.not_finite:
                found[index] = owner.not_finite[there]
        if found:
            first = min(found, key=self.layout.position)
            name, others = self.names[first], len(found) - 1
            raise NonFiniteGradientError(culprit(name, found[first], others, self.steps + 1))

    def drop_not_finite(self) -> None:
        """Forget the non-finite gradients: all gradients are zero or gone."""
        self.not_finite = {}
        for owner, there in self.elsewhere.values():
            owner.not_finite.pop(there, None)

    def start_bucket(self, index: int) -> None:
        """Start to reduce a bucket with all gradients due here; other ranks will follow."""
        own = self.layout.plan[index].parameters
        for elsewhere in self.elsewhere:  # of these the bucket has no gradients
            own &= ~(1 << elsewhere)
        self._started[index] = self._start_wire(index, own, self._agreement.number, blocking=False)

    def prepare(
        self,
        touched: int,
        sparse: int,
        carried: int,
        unlike: int,
        *,
        due: int,
        number: int,
        active: int,
    ) -> None:
        """Take the gradients of parameters that are about to be reduced. Collective.

        Args:
            touched: the parameters with a gradient on any rank, as a bitmap.
            sparse: the parameters among them whose gradients are sparse on all ranks that have one.
            carried: the parameters among them whose averaged part is not sent, and stays.
            unlike: the parameters of `carried` whose averaged part not all ranks have: it is
                averaged once more.
            due: the gradients that this rank has reported, as a bitmap.
            number: the agreement's number, a part of the names of the operations.
            active: the number of ranks that have not joined.
        """
        self.hooks.require_unchanged(touched)
        self.hooks.carry(carried)
        self.hooks.drop_averaged(touched & ~due & ~carried)
        self._sparse = sparse if self._settings.sparse_as_dense else 0
        sparse ^= self._sparse
        for parameter in _members(unlike):
            self._average_carried(
                parameter, number, active, is_sparse=bool(sparse >> parameter & 1)
            )
        for parameter in _members(sparse):
            self._sparse_sums[parameter] = self._start_sparse_sum(
                f"gradients.{self.index}.{number}.sparse.{self.names[parameter]}",
                self._settings.op,
                parameter,
                self.hooks.local_gradient(parameter, self._scale(active)),
            )
        touched ^= sparse
        self._touched = touched
        self.hooks.move_into_buckets(touched, self._scale(active))

    def _scale(self, active: int) -> float:
        """Return the factor with which an averaged gradient, sent again by all ranks, stays."""
        of_all = 1.0 / self._size if self._settings.op == Sum else 1.0
        return of_all * self._size / active

    def _average_carried(
        self, parameter: int, number: int, active: int, *, is_sparse: bool
    ) -> None:
        """Average the carried part of a gradient, which not all ranks have alike. Collective."""
        name = f"gradients.{self.index}.{number}.carried.{self.names[parameter]}"
        if is_sparse:
            part = self.hooks.sparse_carried(parameter)
            total = self._start_sparse_sum(name, Sum, parameter, part).wait()
            self.hooks.set_sparse_carried(parameter, total / active)
        else:
            part = self.hooks.carried_part(parameter)
            scale = 1.0 / active
            self._engine.run("allreduce", part, part, name, -1, Sum, scale)

    def _start_sparse_sum(
        self, name: str, op: int, parameter: int, gradient: Tensor | None
    ) -> SparseHandle:
        return start_sparse_sum(
            self._engine,
            self._process_set.ranks or [],
            name,
            op,
            self._parameters[parameter],
            _coalesced(gradient),
            joinable=True,
            is_coalesced=False,
        )

    def fill(self, planned: int, due: int) -> int:
        """Move a planned pass's gradients into buckets; return those that are carried.

        Args:
            planned: the gradients of the plan, as a bitmap.
            due: those of them that this rank has in the pass.
        """
        self.hooks.require_unchanged(planned)
        return self.hooks.fill(planned, due, self._scale(self._size))

    @property
    def checks_finite(self) -> bool:
        """Whether the ranks check for non-finite gradients."""
        return self._settings.nan_check

    @property
    def has_started(self) -> bool:
        """Whether a bucket has been sent during the pass."""
        return bool(self._started)

    def start(self, number: int) -> None:
        """Start to reduce the prepared parameters."""
        for index in range(len(self.layout.plan)):
            started = self._started.pop(index, None)
            if started is None:
                started = self._start_wire(index, self._touched, number, blocking=True)
            self._unfinished += started

    def _start_wire(
        self, index: int, touched: int, number: int, *, blocking: bool
    ) -> list[FinishStage]:
        """Start to reduce the touched gradients of a bucket."""
        if not touched & self.layout.plan[index].parameters:
            return []
        name = functools.partial(bucket_name, self.index, number, index)
        memory = self.hooks.memory(index)
        return self.layout.wires[index].start(name, memory, touched, blocking=blocking)

    def finish(self, order: Sequence[int]) -> None:
        """Wait for the reduction, then rebuild the buckets in rank 0's `order`, if it is given."""
        unfinished, self._unfinished = self._unfinished, []
        while unfinished:
            unfinished = [complete for complete in unfinished if complete()]
        self.hooks.mark_reduced(self._touched)
        self._finish_sparse()
        layout = self.layout
        if order and not layout.has_order:
            layout.set_order(order)
            self.plain = self._plain_reduction()
            refuse_ddp(self._parameters)
            tells = self._process_set.rank() == 0
            if tells:
                early = list(filter(layout.overlaps, layout.plan))
                warn_of_one_graph(early, self.hooks.compiled_together())
            layout.start_tuning(f"gradients.{self.index}.tuning", tells=tells)
        elif layout.tuner is not None:
            layout.tuner.pass_ended()

    def _plain_reduction(self) -> PlainReduction | None:
        is_plain = self._settings.compression is Compression.none
        if not is_plain or any(map(self.layout.overlaps, self.layout.plan)):
            return None
        buckets = [bucket.parameters if bucket.numel else 0 for bucket in self.layout.plan]
        arguments = self._settings.arguments(self._size)
        return PlainReduction(self.hooks, self.index, buckets, *arguments, self._scale(self._size))

    def _finish_sparse(self) -> None:
        sums, self._sparse_sums = self._sparse_sums, {}
        for parameter, pending in sums.items():
            self.hooks.set_sparse_result(parameter, pending.wait())
        for parameter in _members(self._sparse):
            gradient = self._parameters[parameter].grad
            assert gradient is not None, "it has just been reduced"
            self.hooks.set_sparse_result(parameter, gradient.to_sparse(1))

    @property
    def runs_ahead(self) -> bool:
        """Whether the buckets can be reduced without an agreement."""
        return (
            self._settings.run_ahead
            and not self.checks_finite  # its error must come before the step
            and self.layout.has_order
            and all(bucket.device.type != "cpu" for bucket in self.layout.plan)
            and all(wire.is_launchable for wire in self.layout.wires)
        )

    def planned_buckets(self, touched: int) -> list[PlannedBucket]:
        """Return the buckets for reducing parameters without an agreement. Only if `runs_ahead`."""
        arguments = self._settings.arguments(self._size)
        buckets = []
        for index, (bucket, wire) in enumerate(
            zip(self.layout.plan, self.layout.wires, strict=True)
        ):
            runs = [run for run in bucket.runs(touched) if run[0] < run[1]]
            if runs and touched & bucket.parameters:
                buffer = wire.buffer
                memory = self.hooks.memory(index).new_empty(1).expand(bucket.numel)
                buckets.append(
                    PlannedBucket(
                        self.hooks,
                        index,
                        runs,
                        memory if buffer is None else buffer,
                        buffer is not None,
                        *arguments,
                    )
                )
        return buckets

    def follow_parameters(self) -> None:
        """Make new buckets for parameters that have moved to another device. Nothing was sent."""
        self.layout.follow_parameters()
        if self.layout.has_order:
            self.plain = self._plain_reduction()


def _coalesced(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient with each row once: repeated sums would multiply its rows."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()


class Reducers:
    """The reducers of a process set by index, as weak references.

    A reducer may disappear at any moment, in any thread: an optimizer that a program has dropped in
    a reference cycle is deleted when Python collects garbage. `pin` keeps all reducers while the
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
        self._pinned: dict[int, Reducer] = {}

    def add(self, index: int, reducer: Reducer) -> None:
        """Add a reducer, until it is removed."""
        references = self._references
        references[index] = weakref.ref(reducer, lambda _: references.pop(index, None))

    def remove(self, index: int) -> None:
        """Remove a reducer, if it is there."""
        self._references.pop(index, None)

    def living(self) -> list[Reducer]:
        """Return the reducers that are there now, whether `pin` keeps others or not."""
        found = [reference() for reference in list(self._references.values())]
        return [reducer for reducer in found if reducer is not None]

    def pin(self) -> list[Reducer]:
        """Keep all reducers alive until `unpin`; return them in the order of their indices."""
        self._pinned = dict(self.items())
        return list(self._pinned.values())

    def unpin(self) -> None:
        """End the effect of `pin`."""
        self._pinned = {}

    def __contains__(self, index: int) -> bool:
        return self.get(index) is not None

    def __getitem__(self, index: int) -> Reducer:
        reducer = self.get(index)
        if reducer is None:
            raise KeyError(index)
        return reducer

    def get(self, index: int) -> Reducer | None:
        """Return a reducer, or None."""
        if held := self._pinned.get(index):
            return held
        reference = self._references.get(index)
        return None if reference is None else reference()

    def items(self) -> list[tuple[int, Reducer]]:
        """Return a snapshot of the indices, ascending, and reducers."""
        if held := self._pinned:
            return list(held.items())
        found = [(index, reference()) for index, reference in list(self._references.items())]
        return [(index, reducer) for index, reducer in found if reducer is not None]

    def values(self) -> list[Reducer]:
        """Return a snapshot of the reducers, in the order of their indices."""
        return [reducer for _, reducer in self.items()]

    def reduce(
        self,
        decision: PassDecision,
        own: Mapping[int, int],
        number: int,
        active: int,
        reduced: Mapping[int, int] | None = None,
    ) -> None:
        """Reduce the gradients that are due on any rank. Collective.

        Args:
            decision: the ranks'.
            own: the gradients that this rank has reported, as a bitmap by optimizer.
            number: the number of the agreement, a part of the names of the operations.
            active: the number of ranks that have not joined.
            reduced: the gradients that are reduced already.
        """
        found = []
        for each in decision.reductions:
            rest = ~(reduced or {}).get(each.optimizer, 0)
            if each.touched & rest:
                found.append((each, self.named(each.optimizer), rest))
        for each, reducer, rest in found:
            reducer.prepare(
                each.touched & rest,
                each.sparse & rest,
                each.carried & rest,
                each.unlike & rest,
                due=own.get(each.optimizer, 0),
                number=number,
                active=active,
            )
        for _, reducer, _ in found:
            reducer.start(number)
        for each, reducer, _ in found:
            reducer.finish(each.order)

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


def weakly(method: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls a method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        found = reference()
        assert found is not None, "its object outlives its caller"
        return found(*args)

    return call


def _ranks(process_set: ProcessSet) -> list[int]:
    """Return the ranks of a process set."""
    return list(process_set.ranks or range(process_set.size()))


def _members(bitmap: int) -> list[int]:
    """Return the parameters of a bitmap."""
    return [index for index in range(bitmap.bit_length()) if bitmap >> index & 1]
