# SPDX-License-Identifier: Apache-2.0
"""BucketLayout: which gradients of an optimizer share a bucket, and where the buckets lie."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ring._C import Engine, GradientHooks
from torch_ring.compression import Compression
from torch_ring.optimizer.autotuner import Autotuner, BucketLimits, untunable
from torch_ring.optimizer.bucket_wire import (
    BucketWire,
    ReductionSettings,
    bucket_memory,
    wire_maker,
)
from torch_ring.optimizer.buckets import Bucket, plan_buckets
from torch_ring.optimizer.parameters import device_problem, spec_of
from torch_ring.world import current

__all__ = ["BucketLayout"]

_log = logging.getLogger("torch_ring")


class BucketLayout:
    """The buckets of one optimizer's gradients.

    At first they are planned by the reverse order of parameters; `set_order` plans them by the
    order in which the gradients become ready. Every change moves the gradients.

    Thread: the one that runs backward(); `new_memory` any of autograd's.

    Args:
        engine: the engine of the process set.
        size: the number of its ranks.
        parameters: leaves, whether they require grad now or not.
        names: the parameters' names in errors.
        settings: how to reduce the gradients.
        groups: indices of parameters whose gradients stay together (`plan_buckets`).

    Attributes:
        plan: the buckets, in the order in which they become full.
        wires: the reduction of each bucket.
        blocks: memory of gradients that fill a bucket alone, if there are such.
        has_order: whether the order of readiness is known.
        tuner: of the sizes of buckets, if they are tuned.

    Raises:
        ValueError: a gradient cannot be reduced, or the compressor serves another optimizer.
    """

    def __init__(
        self,
        engine: Engine,
        size: int,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        settings: ReductionSettings,
        groups: Sequence[Sequence[int]],
    ) -> None:
        named = tuple(zip(names, parameters, strict=True))
        self._engine = engine
        self._parameters = parameters
        self._names = names
        self._settings = settings
        self._groups = groups
        self._specs = [spec_of(name, parameter) for name, parameter in named]
        self._make_wire = wire_maker(settings, engine, size, named)
        direct = settings.direct_bytes > 0 and settings.compression is Compression.none
        self.blocks = engine.gradient_blocks() if direct else None
        self._order: Sequence[int] = range(len(parameters) - 1, -1, -1)
        self._limits = BucketLimits(settings.bucket_bytes)
        self._hooks: GradientHooks | None = None
        self.plan: tuple[Bucket, ...] = ()
        self.wires: list[BucketWire] = []
        self.has_order = False
        self.tuner: Autotuner | None = None

    def attach(self, hooks: GradientHooks) -> None:
        """Make the first buckets, for the gradients of these hooks."""
        self._hooks = hooks
        self._rebuild()

    def position(self, parameter: int) -> int:
        """Return a parameter's position in the order of readiness."""
        return self._order.index(parameter)

    def set_order(self, order: Sequence[int]) -> None:
        """Rebuild the buckets by the order in which gradients become ready.

        Args:
            order: the parameters whose gradients have come; the others follow, in reverse order.
        """
        self.has_order = True
        rest = set(range(len(self._specs))).difference(order)
        self._order = [*order, *sorted(rest, reverse=True)]
        self._rebuild()

    def start_tuning(self, name: str, *, tells: bool) -> None:
        """Tune the sizes of the buckets, if that is switched on and can help. Collective.

        Args:
            name: of the tuner's operations.
            tells: whether this rank logs what becomes of it.
        """
        config = current.config()
        if not config.autotune:
            return
        problem = untunable(self._settings.compression, self.plan, self._engine.overlaps())
        if problem:
            if tells:
                _log.info("autotune: the buckets stay: %s", problem)
            return
        self.tuner = Autotuner(
            self._engine,
            name,
            self._parameters,
            self._limits,
            plan_of=self._planned_within,
            rebuild=self._set_limits,
            tells=tells,
            log_path=config.autotune_log,
        )

    def overlaps(self, bucket: Bucket) -> bool:
        """Return whether a bucket may be sent during backward: on a GPU, or between hosts.

        Inside a host the ranks' own cores would reduce it.
        """
        return bucket.device.type != "cpu" or self._engine.overlaps()

    def new_memory(self, bucket: int) -> Tensor:
        """Return new memory for a bucket."""
        return bucket_memory(self._engine, self.plan[bucket], self.plan[bucket].dtype)

    def follow_parameters(self) -> None:
        """Make new buckets for parameters that have moved to another device. Nothing was sent."""
        problem = device_problem(self._parameters)
        if problem:
            self._engine.end(f"a model has moved: {problem}")
        named = zip(self._names, self._parameters, strict=True)
        self._specs = [spec_of(name, parameter) for name, parameter in named]
        self._rebuild()

    def _set_limits(self, limits: BucketLimits) -> None:
        self._limits = limits
        self._rebuild()

    def _planned_within(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        return plan_buckets(
            self._specs,
            self._order,
            limits.capacity_bytes,
            limits.last_bytes,
            groups=self._groups,
            alone=self._large_ones(),
        )

    def _rebuild(self) -> None:
        """Plan the buckets by the order of readiness, and move every gradient into its own."""
        plan = self._planned_within(self._limits)
        if plan == self.plan:
            return
        hooks = self._hooks
        assert hooks is not None, "attach() comes first"
        self.plan = plan
        self.wires = [self._make_wire(bucket, hooks.bucket_view) for bucket in plan]
        direct = self._large_ones()
        slots: dict[int, tuple[int, int]] = {
            slot.parameter: (index, slot.offset)
            for index, bucket in enumerate(plan)
            for slot in bucket.slots
        }
        hooks.set_buckets(
            [
                torch.empty(0, dtype=bucket.dtype, device="cpu")
                if bucket.slots[0].parameter in direct
                else bucket_memory(self._engine, bucket, bucket.dtype)
                for bucket in plan
            ],
            [slots[i] for i in range(len(self._specs))],
            [self.overlaps(bucket) for bucket in plan],
        )

    def _large_ones(self) -> frozenset[int]:
        """Return the parameters whose gradients lie in blocks of their own."""
        if not self.blocks:
            return frozenset()
        grouped = {parameter for group in self._groups for parameter in group}
        return frozenset(
            parameter
            for parameter, spec in enumerate(self._specs)
            if spec.device.type == "cpu"
            and spec.numel * spec.dtype.itemsize >= self._settings.direct_bytes
            and parameter not in grouped
        )
