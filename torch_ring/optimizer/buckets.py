# SPDX-License-Identifier: Apache-2.0
"""Bucket: gradients that are reduced together, planned without tensors or communication."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

__all__ = ["Bucket", "Slot", "TensorSpec", "plan_buckets", "split_evenly"]

ALIGNMENT_BYTES = 64
"""Every gradient begins on a cache line, so that ranks that write neighbours share no line."""

FIRST_BUCKET_BYTES = 1 << 20
"""The most bytes of the first bucket on a device: it is sent early in backward. DDP's is as large.

Not on the CPU, where buckets of one host are sent when backward ends.
"""

LAST_BUCKET_BYTES = 1 << 20
"""The most bytes of the last bucket, which is left to reduce when backward ends."""


@dataclass(frozen=True)
class TensorSpec:
    """The size, dtype and device of a gradient."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def aligned_numel(self) -> int:
        """The number of elements, rounded up to a multiple of `ALIGNMENT_BYTES`."""
        alignment = ALIGNMENT_BYTES // self.dtype.itemsize
        return -(-self.numel // alignment) * alignment

    @property
    def aligned_bytes(self) -> int:
        """The bytes of `aligned_numel` elements."""
        return self.aligned_numel * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """One parameter's gradient in its bucket; offset and length in elements."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that share a flat tensor of `numel` elements, in the order of `slots`."""

    dtype: torch.dtype
    device: torch.device
    numel: int
    slots: tuple[Slot, ...]

    @cached_property
    def parameters(self) -> int:
        """The bitmap of the bucket's parameters: bit i is parameter i."""
        return sum(1 << slot.parameter for slot in self.slots)

    def runs(self, touched: int) -> list[tuple[int, int]]:
        """Return (begin, end) of each longest range of touched gradients, in elements.

        Other gradients are not sent, so that they keep their values: a Sum would multiply a
        gradient of an earlier step.

        Args:
            touched: the bitmap of the parameters to reduce.
        """
        if touched & self.parameters == self.parameters:
            ranges = [(0, self.numel)]
        else:
            ranges = []
            extends = False
            for slot in self.slots:
                if touched >> slot.parameter & 1:
                    begin = ranges.pop()[0] if extends else slot.offset
                    ranges.append((begin, slot.offset + slot.numel))
                extends = bool(touched >> slot.parameter & 1)
        return [(begin, end) for begin, end in ranges if begin < end]


def plan_buckets(
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    capacity_bytes: int,
    last_bytes: int = LAST_BUCKET_BYTES,
    groups: Sequence[Sequence[int]] = (),
    alone: Collection[int] = (),
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """Pack gradients into buckets in the order in which they become ready.

    A bucket holds one dtype on one device. The gradients that are ready last get a bucket of at
    most `last_bytes`, so that little is left at the end. On a device, those that are ready first
    get one of at most `first_bytes`, so that a transfer begins early. A gradient that is larger
    than a limit gets a bucket of its own. A group of gradients of any size gets a bucket of its own
    for each dtype and device, and so does each gradient of `alone`.

    Args:
        specs: the gradients, by parameter index.
        order: a permutation of the parameter indices.
        capacity_bytes: the most bytes of a bucket.
        last_bytes: the most bytes of the last bucket, if that is less.
        groups: parameters that stay together; each is in one group or in none.
        alone: parameters that share a bucket with no other; in no group.
        first_bytes: the most bytes of the first bucket on a device, if that is less.

    Returns:
        The buckets, in the order in which they become full.

    Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training", VLDB 13(12), 2020, section 3.2.
    """
    group_of = {parameter: index for index, group in enumerate(groups) for parameter in group}
    kinds: dict[tuple[torch.dtype, torch.device, int | None], list[int]] = {}
    parts: list[list[int]] = []
    for parameter in order:
        if parameter in alone:
            parts.append([parameter])
            continue
        spec = specs[parameter]
        kind = (spec.dtype, spec.device, group_of.get(parameter))
        kinds.setdefault(kind, []).append(parameter)
    for (_, device, group_index), parameters in kinds.items():
        if group_index is None:
            first = capacity_bytes if device.type == "cpu" else min(first_bytes, capacity_bytes)
            last = min(last_bytes, capacity_bytes)
            parts += _split(specs, parameters, first, capacity_bytes, last)
        else:
            parts.append(parameters)
    ready_at = {parameter: position for position, parameter in enumerate(order)}
    parts.sort(key=lambda part: ready_at[part[-1]])
    return tuple(_lay_out(specs, part) for part in parts)


def split_evenly(count: int, parts: int) -> list[range]:
    """Cut `count` parameters into `parts` consecutive groups; the first may have one more."""
    ends = [part * (count // parts) + min(part, count % parts) for part in range(parts + 1)]
    return [range(begin, end) for begin, end in pairwise(ends) if begin < end]


def _split(
    specs: Sequence[TensorSpec],
    parameters: Sequence[int],
    first_bytes: int,
    capacity_bytes: int,
    last_bytes: int,
) -> list[list[int]]:
    """Cut `parameters`, all of one kind, into parts that fit the limits."""
    tail = _fitting([specs[parameter] for parameter in reversed(parameters)], last_bytes)
    body, last = parameters[: len(parameters) - tail], parameters[len(parameters) - tail :]
    parts: list[list[int]] = []
    while body:
        limit = capacity_bytes if parts else first_bytes
        count = _fitting([specs[parameter] for parameter in body], limit)
        parts.append(list(body[:count]))
        body = body[count:]
    return [*parts, list(last)]


def _fitting(specs: Sequence[TensorSpec], limit_bytes: int) -> int:
    """Return the number of first `specs` that fit into `limit_bytes`, at least 1."""
    total = 0
    for count, spec in enumerate(specs):
        total += spec.aligned_bytes
        if total > limit_bytes and count > 0:
            return count
    return len(specs)


def _lay_out(specs: Sequence[TensorSpec], parameters: Sequence[int]) -> Bucket:
    """Return a bucket with gradients of one kind laid out one after the other."""
    slots: list[Slot] = []
    offset = 0
    for parameter in parameters:
        slots.append(Slot(parameter, offset, specs[parameter].numel))
        offset += specs[parameter].aligned_numel
    first, last = specs[parameters[0]], slots[-1]
    return Bucket(first.dtype, first.device, last.offset + last.numel, tuple(slots))
