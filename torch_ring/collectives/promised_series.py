# SPDX-License-Identifier: Apache-2.0
"""PromisedSeries: collectives on a device that repeat themselves share one agreement of the hosts.

A *series* is a run of collectives of one kind (gathers in forward, sums in backward) with nothing
else that this rank requests of the set in between. It begins with one agreement of all ranks. If
the series that began here the last times was the same, that agreement is a *promise*: all ranks
launch its collectives in its order, without another agreement (csrc/gradients/promised_launches.h).
Otherwise the ranks agree on each collective.

**No rank hangs.** A rank keeps its promise whatever its program does: before anything else that it
requests, it launches NaN for the rest. If all ranks do so at the same place, nothing is lost, and
they go on.

**No ranks differ in silence.** The next agreement compares how many collectives each rank has left.
If these numbers differ, all ranks raise MismatchError; the results of the series are void until
then.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_ring._C import PromisedLaunches
from torch_ring.errors import MismatchError
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, membership

__all__ = ["PromisedSeries", "series_of"]

_NEEDED = 2  # equal series before one is promised
_LONGEST = 1000  # collectives of a series
_MOST = 1000  # remembered series, in a program that never repeats itself

_Step = tuple[bool, int, bool, int]  # a gather or a sum, its elements, float64 or 32, caller
_Steps = tuple[_Step, ...]


@dataclass(frozen=True)
class _Known:
    steps: _Steps
    times: int


class PromisedSeries:
    """The series of the global process set on this rank.

    Thread: one at a time. Blocking: until all ranks have agreed; not in a promised series.
    """

    def __init__(self) -> None:
        world = current.world()
        self._engine = world.engine
        self._rank, self._size = world.rank, world.size
        self._process_sets = world.process_sets
        self._on_absence = world.on_absence
        self._native = PromisedLaunches(world.engine)
        self._steps: list[_Step] = []  # of this series so far
        self._promise: _Steps = ()  # none: the ranks agree on each collective
        self._left = 0  # promised collectives that the program has left, since the last agreement
        # By the two series before and the first step:
        self._known: dict[tuple[tuple[int, int], _Step], _Known] = {}
        self._before = (0, 0)
        world.before_join.append(self._settle)
        world.on_rejoin.append(self._forget)
        world.process_sets.on_change.append(self._settle)

    def gather(self, row: Tensor, caller: int) -> Tensor:
        """Return the rows of all ranks, in their order, without those of ranks that have joined.

        Args:
            row: float64, one-dimensional, on the device.
            caller: the same number in each repetition, on this rank.

        Raises:
            RingError: MismatchError, PeerLostError or TimeoutError.
        """
        return self._run(row, caller, gathers=True)

    def sum(self, values: Tensor, caller: int) -> Tensor:
        """Sum a tensor over the ranks, in place.

        Args:
            values: float32 or float64, contiguous, on the device.
            caller: the same number in each repetition, on this rank.

        Raises:
            RingError: MismatchError, PeerLostError or TimeoutError.
        """
        return self._run(values, caller, gathers=False)

    def _run(self, tensor: Tensor, caller: int, *, gathers: bool) -> Tensor:
        step = (gathers, tensor.numel(), tensor.dtype == torch.float64, caller)
        if not self._goes_on(step):
            self._begin(step, tensor)
        if self._promise:
            launched = self._native.launch(tensor, gathers)
            if launched is not None:
                self._steps.append(step)
                return launched.wait()
            self._begin(step, tensor, may_promise=False)  # another thread has interrupted it
        if gathers:
            result = self._gather(tensor.unsqueeze(0))
        else:
            result = self._engine.run("allreduce", tensor, tensor)
        self._steps.append(step)
        self._native.begin([], tensor, _is_in_backward())
        return result

    def _gather(self, tensor: Tensor) -> Tensor:
        return self._engine.submit("allgather", tensor, None, None, True, joinable=True).wait()

    def _goes_on(self, step: _Step) -> bool:
        """Return whether the step continues this series."""
        done = len(self._steps)
        if not done or done == _LONGEST or self._native.is_interrupted():
            return False
        first = self._steps[0]
        if step == first or step[0] != first[0]:
            return False
        return not self._promise or self._promise[done : done + 1] == (step,)

    def _begin(self, step: _Step, like: Tensor, *, may_promise: bool = True) -> None:
        """Begin a series, in one agreement of all ranks."""
        self._end()
        known = self._known.get((self._before, step))
        promise: _Steps = ()
        # NCCL needs one order of all communicators.
        if known and known.times >= _NEEDED and may_promise and not self._has_other_sets():
            promise = known.steps
        items = [item[:3] for item in promise]
        place = self._native.place() if promise else -1
        own = [zlib.crc32(repr(items).encode()), place, self._left]
        message = torch.tensor([own], dtype=torch.int64, device="cpu")
        ranks = self._gather(message).tolist()
        left, self._left = [rank[2] for rank in ranks], 0
        if len(set(left)) > 1:
            self._forget()
            raise self._mismatch(left)
        if len(ranks) < self._size and not _is_in_backward():
            for callback in self._on_absence:
                callback()
        if place < 0 or len(ranks) < self._size or any(rank != own for rank in ranks):
            items, promise = [], ()
        self._promise = promise
        self._native.begin(items, like, _is_in_backward())

    def _end(self) -> None:
        """End the series: keep its promise, and remember it."""
        left = self._native.end()
        self._left += left
        if not self._steps:
            return
        steps = tuple(self._steps)
        key = (self._before, steps[0])
        if left:
            self._known.pop(key, None)
        elif not self._promise:
            known = self._known.get(key)
            times = known.times + 1 if known and known.steps == steps else 1
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = _Known(steps, times)
        self._before = (self._before[1], hash(steps))
        self._steps, self._promise = [], ()

    def _has_other_sets(self) -> bool:
        sets = self._process_sets.engines()
        return any(number > 0 and len(ranks) > 1 for number, ranks, _ in sets)

    def _mismatch(self, left: list[int]) -> MismatchError:
        told = ", ".join(
            f"rank {rank} {number}" if len(left) == self._size else str(number)
            for rank, number in enumerate(left)
        )
        return MismatchError(
            f"rank {self._rank}: SyncBatchNorm: the ranks have not run the same layers. Of a "
            "series of layers that had repeated itself, the ranks have left out at its end: "
            f"{told}. The results of that forward or backward pass are void (NaN). All ranks must "
            "run the same layers in the same order; with TORCH_RING_RUN_AHEAD=0 they agree on each "
            "layer, and an error names the first difference"
        )

    def _settle(self) -> None:
        """Before anything after which the ranks cannot compare what they have left."""
        self._end()
        if self._left:
            self._engine.end(
                f"rank {self._rank}: SyncBatchNorm: the last pass has left out {self._left} layers "
                "that the passes before it had: then it must not be followed by join(), nor by "
                "add_process_set(), at once"
            )

    def _forget(self) -> None:
        self._end()
        self._left = 0
        self._known.clear()
        self._before = (0, 0)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def series_of(process_set: ProcessSet, tensor: Tensor) -> PromisedSeries | None:
    """Return the series of a set; None: the ranks agree on each collective of such a tensor."""
    record = membership(process_set)
    world = current.world()
    if tensor.device.type == "cpu" or record.id != 0 or not world.config.run_ahead:
        return None
    if any(each.id != 0 and len(each.ranks) > 1 for each in world.process_sets.records):
        return None
    if PromisedSeries not in record.owned:
        record.owned[PromisedSeries] = PromisedSeries()
    series: PromisedSeries = record.owned[PromisedSeries]
    return series
