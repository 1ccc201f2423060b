"""Reducer: keeps the gradients of one optimizer in buckets, and averages them over the ranks."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_ring._C import (
    DenseFinalizer,
    Due,
    GradientHooks,
    PlannedBucket,
    bucket_name,
    device_in_use,
)
from torch_ring.collectives.compare import require_same
from torch_ring.collectives.reduce_op import Max, Sum
from torch_ring.collectives.sparse import SparseHandle, start_sparse_sum
from torch_ring.compression import Compression
from torch_ring.errors import InvalidArgumentError
from torch_ring.optimizer.autotuner import Autotuner, BucketLimits, untunable
from torch_ring.optimizer.backward_sync import BackwardSync
from torch_ring.optimizer.bucket_wire import BucketWire, FinishStage, bucket_memory, wire_maker
from torch_ring.optimizer.buckets import Bucket, TensorSpec, plan_buckets
from torch_ring.optimizer.gradient_report import GradientReport, refuse_sharded, warn_of_ddp
from torch_ring.optimizer.participants import FastPath
from torch_ring.optimizer.settings import ReductionSettings
from torch_ring.optimizer.weight_comparison import WeightComparison, is_compared
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet

__all__ = ["Reducer", "coalesced", "has_gradients"]

_ON_NO_DEVICE = ("cpu", "meta")


def device_problem(parameters: Iterable[Tensor]) -> str | None:
    """Return why one process cannot reduce the gradients of the parameters; None if it can.

    One process drives one device, beside the CPU: that of its first collective on a device.

    Args:
        parameters: on any devices.
    """
    devices = {p.device for p in parameters if p.device.type not in _ON_NO_DEVICE}
    used = device_in_use()
    if len(devices) > 1:
        places = " and ".join(sorted(map(str, devices)))
        return f"the parameters are on {places}, {_instead(devices)}"
    if used is not None and devices - {used}:
        return (
            f"this process has used {used}, and the parameters are on {devices.pop()}, "
            f"{_instead({used})}"
        )
    return None


def _instead(devices: Iterable[torch.device]) -> str:
    types = {device.type for device in devices}
    choose = "torch.cuda.set_device(local_rank())" if types == {"cuda"} else "the current device"
    return (
        "and one process drives one device. Start a process for each device, keep the model on "
        f"one of them, and choose it before the first collective, by {choose}"
    )


_REDUCIBLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def has_gradients(parameter: Tensor) -> bool:
    """Return whether a parameter has gradients to reduce, now or, if it is frozen, perhaps later.

    A frozen one of another dtype (a quantised weight) is none of an optimizer's business.
    """
    return parameter.requires_grad or parameter.dtype in _REDUCIBLE or parameter.is_complex()


def spec_of(name: str, parameter: Tensor) -> TensorSpec:
    """Return what the planner needs; a complex number is two real ones."""
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    numel = parameter.numel()
    if dtype.is_complex:
        dtype, numel = dtype.to_real(), 2 * numel
    if dtype not in _REDUCIBLE:
        raise ValueError(f"the gradient of '{name}' has dtype {dtype}, which cannot be reduced")
    return TensorSpec(numel, dtype, parameter.device)


def coalesced(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient with each row once: summed again and again, its rows would multiply."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()


def require_same_parameters(
    process_set: ProcessSet,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    settings: ReductionSettings,
    groups: Sequence[Sequence[int]],
) -> None:
    """Raise on all ranks, if they wrap different parameters, or wrap them differently."""
    problem = device_problem(parameters)
    lines = [problem or settings.describe()]
    group_of = {parameter: index for index, group in enumerate(groups) for parameter in group}
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        dtype = str(parameter.dtype).removeprefix("torch.")
        line = f"'{name}' {dtype} {list(parameter.shape)}"
        # The order of elements in memory is the order in which they are added up.
        line += "" if parameter.is_contiguous() else f" with strides {parameter.stride()}"
        line += f" on {parameter.device.type}"
        line += f" in group {group_of[index]}" if index in group_of else ""
        lines.append(line)
    require_same(lines, "the ranks wrap different optimizers", process_set)
    if problem:  # on all ranks
        raise InvalidArgumentError(problem)


_log = logging.getLogger("torch_ring")


class Reducer:
    """Keeps the gradients of one optimizer's parameters in buckets, and reduces those.

    Making one is collective: all ranks make theirs in the same order, for the same parameters.

    Thread: the one that runs backward(); `start_bucket` any of autograd's. Errors: MismatchError,
    naming the first parameter that differs between two ranks; ValueError for one that cannot be
    reduced.

    Args:
        sync: synchronises all reducers of this process set.
        parameters: leaves, whether they require grad now or not.
        names: the parameters' names in errors.
        settings: how to reduce the gradients.
        groups: indices of parameters whose gradients stay together (`plan_buckets`).
    """

    def __init__(
        self,
        sync: BackwardSync,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        settings: ReductionSettings,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        named = tuple(zip(names, parameters, strict=True))
        refuse_sharded(named)
        require_same_parameters(sync.process_set, parameters, names, settings, groups)
        self._sync = sync
        self._engine = sync.engine
        self._parameters = parameters
        self.names = names
        self._settings = settings
        self._groups = groups
        self._specs = [spec_of(name, parameter) for name, parameter in named]
        # Checks come before the hooks: a refused optimizer must leave no trace.
        self._make_wire = wire_maker(settings, sync.engine, sync.size, named)
        self._is_plain = settings.compression is Compression.none
        direct = settings.direct_bytes > 0 and self._is_plain
        blocks = sync.engine.gradient_blocks() if direct else None
        self._least_direct_bytes = settings.direct_bytes if blocks else None
        self._direct = self._large_ones()
        self.nothing_pending = False
        self.steps = 0
        self._steps_alone = False  # the step that is under way, with this rank's gradients
        self.fast_path: FastPath | None = None
        self.index = sync.register(self)
        self.owner: weakref.ref[object] | None = None  # the optimizer; releases this when it goes
        named_weights = dict(zip(parameters, names, strict=True))
        self.comparison = WeightComparison(named_weights, sync.process_set)
        self.hooks = GradientHooks(
            parameters,
            names,
            reduced_scale=1.0 / sync.size if settings.op == Sum else 1.0,
            on_backward_end=sync.on_backward_end,
            on_bucket_full=functools.partial(sync.start_bucket, self.index),
            new_memory=functools.partial(sync.new_memory, self.index),
            fail=sync.fail,
            blocks=blocks,
            agreement=sync.agreement,
            run_ahead=sync.run_ahead.hooks,
        )
        self.hooks.set_base_scale(sync.base_scale)
        sync.share(self)
        sync.run_ahead.add(self.index, self.hooks)
        self._plan: tuple[Bucket, ...] = ()
        self._wires: list[BucketWire] = []
        self._started: dict[int, list[FinishStage]] = {}  # whole buckets, sent during the pass
        self._unfinished: list[FinishStage] = []
        self._touched = 0  # parameters that are reduced in buckets
        self._sparse = 0  # those of them whose gradients become sparse again afterwards
        self._sparse_sums: dict[int, SparseHandle] = {}
        self._of_joined: dict[int, Tensor] = {}  # what this pass lacks of averaged gradients
        self._asked_in = -1  # the agreement in which that was found
        self._order_is_real = False
        self._order: Sequence[int] = range(len(parameters) - 1, -1, -1)
        self._limits = BucketLimits(settings.bucket_bytes)
        self._tuner: Autotuner | None = None
        self._rebuild_buckets()
        current.disable_in_child(self.hooks)

    def release(self) -> None:
        """Leave the agreement, and ignore gradients from now on. Thread: any."""
        self.hooks.disable()
        self._sync.unregister(self.index)
        self.nothing_pending = True

    def reduce_pending(self) -> None:
        """Reduce whatever any rank has accumulated; see `BackwardSync.reduce_pending`."""
        self._sync.reduce_pending(self)

    def finish_step(self) -> None:
        """Begin the next step: nothing of it is reduced yet."""
        self.steps += 1
        self._sync.finish_step(self)
        self.hooks.reset(gradients=False)
        is_alone, self._steps_alone = self._steps_alone, False
        if not self.comparison.has_begun:
            self.comparison.snapshot = None  # of weights before this step
        elif is_compared(self.steps) and not is_alone:
            self.comparison.take(self.steps, self._sync.number)

    def begin_unreduced_step(self) -> None:
        """Note whether gradients of this rank alone are there, with which it steps now.

        The weights after such a step (of local SGD, say) are not compared.
        """
        if is_compared(self.steps + 1):
            due, _, accumulating, *_ = self.hooks.pending(Due.everything)
            self._steps_alone = accumulating or any(due)

    def drop_gradients(self) -> None:
        """Drop what has been accumulated: the gradients are zero or gone."""
        self.nothing_pending = False
        self.hooks.reset(gradients=True)
        if self.hooks.parameters_moved():
            self.follow_parameters()

    def reduce_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of all ranks together, reduced as the gradients are."""
        reduced = loss.detach().clone()
        name = f"gradients.{self.index}.{self._sync.number}.loss"
        work = self._engine.allreduce(
            reduced, reduced, name, self._settings.op, 1.0, 1.0, blocking=True
        )
        return work.wait()

    def report(self, everything: bool) -> GradientReport | None:
        """See `Participant`."""
        which = Due.everything if everything else Due.now
        due, sparse, accumulating, unready, complete, again = self.hooks.pending(which)
        if unready:
            self.hooks.refuse_others_pass()
            self.follow_parameters()
            due, sparse, accumulating, _, complete, again = self.hooks.pending(which)
        bitmap = int.from_bytes(due, "little")
        if not (bitmap or accumulating or again or everything):
            return None
        order = () if self._order_is_real else tuple(self.hooks.ready_order())
        return GradientReport(
            self.index,
            bitmap,
            int.from_bytes(sparse, "little"),
            accumulating,
            incomplete=not complete,
            stepping=everything,
            again=again,
            on_base=accumulating and self.hooks.has_base(),
            order=order,
        )

    def start_bucket(self, index: int) -> None:
        """Start to reduce a bucket all of which is due here: other ranks will follow."""
        self._started[index] = self._start_wire(
            index, self._plan[index].parameters, self._sync.number, blocking=False
        )

    def new_memory(self, bucket: int) -> Tensor:
        """See `Participant`."""
        return bucket_memory(self._engine, self._plan[bucket], self._plan[bucket].dtype)

    def prepare(self, touched: int, sparse: int, number: int) -> None:
        """See `Participant`."""
        self._sparse = sparse if self._settings.sparse_as_dense else 0
        sparse ^= self._sparse
        for parameter in _members(sparse):
            self._sparse_sums[parameter] = start_sparse_sum(
                self._engine,
                self._sync.process_set.ranks or [],
                f"gradients.{self.index}.{number}.sparse.{self.names[parameter]}",
                self._settings.op,
                self._parameters[parameter],
                coalesced(self.hooks.local_gradient(parameter)),
                joinable=True,
                is_coalesced=False,
            )
        touched ^= sparse
        self._touched = touched
        if self._asked_in != number:  # that agreement has failed
            self._of_joined.clear()
        self.hooks.move_into_buckets(self.bitmap(touched))

    def ask_joined(self, touched: int, number: int, before: float, after: float) -> str:
        """See `Participant`."""
        self._of_joined.clear()
        self._asked_in = number
        name = f"gradients.{self.index}.{number}.kept"
        mine = self.hooks.bases()
        bases = torch.tensor(mine, dtype=torch.uint8, device="cpu")
        self._engine.allreduce(bases, bases, name, Max, 1.0, 1.0, blocking=True).wait()
        for index, base in enumerate(bases.tolist()):
            if not base:
                continue
            if base > 1:
                return f"'{self.names[index]}' may have been changed since it was averaged"
            spec = self._specs[index]
            dtype = torch.float32 if spec.dtype.itemsize == 2 else spec.dtype
            kept = torch.zeros(spec.numel + 1, dtype=dtype, device="cpu")
            work = self._engine.allreduce(
                kept, kept, f"{name}.{index}", Sum, 1.0, 1.0, blocking=True
            )
            givers = work.wait()[-1].item()
            if not givers:
                return f"no rank that has joined has '{self.names[index]}' still, unchanged"
            kept = kept[:-1] / givers
            if touched >> index & 1:
                self.hooks.keep_scale(index)
                self._of_joined[index] = kept * (1 - before / after)
            elif mine[index]:  # it is reduced later
                scale = 1 / self._sync.size if self._settings.op == Sum else 1.0
                self.hooks.add(index, kept * (scale * (after - before)))
        return ""

    def start(self, number: int) -> None:
        """See `Participant`."""
        for index in range(len(self._plan)):
            started = self._started.pop(index, None)
            if started is None:
                started = self._start_wire(index, self._touched, number, blocking=True)
            self._unfinished += started

    def _start_wire(
        self, index: int, touched: int, number: int, *, blocking: bool
    ) -> list[FinishStage]:
        """Start to reduce the touched gradients of a bucket."""
        if not touched & self._plan[index].parameters:
            return []
        name = functools.partial(bucket_name, self.index, number, index)
        memory = self.hooks.memory(index)
        return self._wires[index].start(name, memory, touched, blocking=blocking)

    def finish(self, order: Sequence[int]) -> None:
        """See `Participant`."""
        unfinished, self._unfinished = self._unfinished, []
        while unfinished:
            unfinished = [complete for complete in unfinished if complete()]
        self.hooks.mark_reduced(self.bitmap(self._touched))
        of_joined, self._of_joined = self._of_joined, {}
        for index, gradient in of_joined.items():
            self.hooks.add(index, gradient)
        self._finish_sparse()
        if order and not self._order_is_real:
            self._order_is_real = True
            rest = set(range(len(self._specs))).difference(order)
            self._order = [*order, *sorted(rest, reverse=True)]
            self._rebuild_buckets()
            self.fast_path = self._make_fast_path()
            if self._sync.process_set.rank() == 0:
                warn_of_ddp(self._parameters)
            self._tuner = self._make_tuner()
        elif self._tuner is not None:
            self._tuner.pass_ended()

    def stop_tuning(self) -> None:
        """See `Participant`."""
        if self._tuner is not None:
            self._tuner.stop()

    def _make_tuner(self) -> Autotuner | None:
        """Return what tunes the sizes of buckets, if that is wanted, and they matter."""
        tells = self._sync.process_set.rank() == 0
        config = current.config()
        if not config.autotune:
            return None
        problem = untunable(self._settings, self._plan, self._engine.overlaps())
        if problem:
            if tells:
                _log.info("autotune: the buckets stay: %s", problem)
            return None
        return Autotuner(
            self._engine,
            f"gradients.{self.index}.tuning",
            self._parameters,
            self._limits,
            plan_of=self._planned_within,
            rebuild=self._set_limits,
            tells=tells,
            log_path=config.autotune_log,
        )

    def _set_limits(self, limits: BucketLimits) -> None:
        self._limits = limits
        self._rebuild_buckets()

    def _overlaps(self, device: torch.device) -> bool:
        """Return whether reducing during backward leaves it the processor."""
        return device.type != "cpu" or self._engine.overlaps()

    def _make_fast_path(self) -> FastPath | None:
        """Return the fast path, where gradients are summed as they are and after the pass."""
        if not self._is_plain or any(self._overlaps(bucket.device) for bucket in self._plan):
            return None
        buckets = [index for index, bucket in enumerate(self._plan) if bucket.numel]
        everything = (1 << len(self._specs)) - 1
        arguments = self._settings.arguments(self._sync.size)
        finalizer = DenseFinalizer(
            self.hooks, self.index, self.bitmap(everything), buckets, *arguments
        )
        return FastPath(finalizer, GradientReport(self.index, everything))

    def _finish_sparse(self) -> None:
        sums, self._sparse_sums = self._sparse_sums, {}
        for parameter, pending in sums.items():
            self.hooks.set_sparse_result(parameter, pending.wait())
        for parameter in _members(self._sparse):
            gradient = self._parameters[parameter].grad
            assert gradient is not None, "it has just been reduced"
            self.hooks.set_sparse_result(parameter, gradient.to_sparse(1))

    def bitmap(self, parameters: int) -> bytes:
        """See `Participant`."""
        return parameters.to_bytes((len(self._specs) + 7) // 8, "little")

    def is_all(self, parameters: int) -> bool:
        """See `Participant`."""
        return parameters.bit_count() == len(self._specs)

    @property
    def runs_ahead(self) -> bool:
        """See `Participant`."""
        return (
            self._settings.run_ahead
            and self._order_is_real
            and all(bucket.device.type != "cpu" for bucket in self._plan)
            and all(wire.is_launchable for wire in self._wires)
        )

    def planned_buckets(self, touched: int) -> list[PlannedBucket]:
        """See `Participant`."""
        arguments = self._settings.arguments(self._sync.size)
        buckets = []
        for index, (bucket, wire) in enumerate(zip(self._plan, self._wires, strict=True)):
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
        """See `Participant`."""
        if self._started or self._sync.run_ahead.has_launched:
            self._sync.fail(
                "parameters have moved to another device, and part of the gradients had been sent "
                "when a backward pass found that: call zero_grad() after moving a model"
            )
        problem = device_problem(self._parameters)
        if problem:
            self._sync.fail(f"a model has moved: {problem}")
        self._sync.run_ahead.stop()
        named = zip(self.names, self._parameters, strict=True)
        self._specs = [spec_of(name, parameter) for name, parameter in named]
        self._direct = self._large_ones()
        self._rebuild_buckets()
        if self._order_is_real:
            self.fast_path = self._make_fast_path()

    def _planned_within(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        return plan_buckets(
            self._specs,
            self._order,
            limits.capacity_bytes,
            limits.last_bytes,
            groups=self._groups,
            alone=self._direct,
        )

    def _rebuild_buckets(self) -> None:
        """Plan the buckets by the order of readiness, and move every gradient into its own."""
        plan = self._planned_within(self._limits)
        if plan == self._plan:
            return
        self._plan = plan
        self._wires = [self._make_wire(bucket, self.hooks) for bucket in plan]
        slots: dict[int, tuple[int, int]] = {
            slot.parameter: (index, slot.offset)
            for index, bucket in enumerate(plan)
            for slot in bucket.slots
        }
        self.hooks.set_buckets(
            [
                torch.empty(0, dtype=bucket.dtype, device="cpu")
                if bucket.slots[0].parameter in self._direct
                else bucket_memory(self._engine, bucket, bucket.dtype)
                for bucket in plan
            ],
            [slots[i] for i in range(len(self._specs))],
            [self._overlaps(bucket.device) for bucket in plan],
        )

    def _large_ones(self) -> frozenset[int]:
        """Return the parameters whose gradients lie in blocks of their own."""
        least_bytes = self._least_direct_bytes
        if least_bytes is None:
            return frozenset()
        grouped = {parameter for group in self._groups for parameter in group}
        return frozenset(
            parameter
            for parameter, spec in enumerate(self._specs)
            if spec.device.type == "cpu"
            and spec.numel * spec.dtype.itemsize >= least_bytes
            and parameter not in grouped
        )


def _members(bitmap: int) -> list[int]:
    """Return the parameters of a bitmap."""
    return [index for index in range(bitmap.bit_length()) if bitmap >> index & 1]
