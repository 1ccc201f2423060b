"""What ends a backward pass: the ranks agree on which gradients there are, and reduce those."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from torch_ring import _C, world
from torch_ring.errors import MismatchError, RingError

__all__ = ["BackwardPasses", "Participant", "Report"]


@dataclass(frozen=True)
class Report:
    """What one rank says about the gradients of one optimizer.

    Attributes:
        participant: the optimizer's index, the same on all ranks.
        due: the parameters to reduce now, as a bitmap (bit i is parameter i).
        held_back: whether there are gradients that are to be reduced later in this step.
        order: parameters in the order in which their gradients became ready, if that is news.
    """

    participant: int
    due: int
    held_back: bool = False
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Entry:
    """What one rank says at the end of a pass.

    Attributes:
        steps: steps that its optimizers have taken, all together.
        reports: about each optimizer that has something to say.
    """

    steps: int
    reports: tuple[Report, ...] = ()

    # Sizes in bytes or elements; little-endian, no padding.
    _HEADER = struct.Struct("<IQI")  # bytes of the entry, steps, reports
    _REPORT = struct.Struct("<I?II")  # participant, held_back, bytes of due, elements of order

    def encode(self) -> bytes:
        """Return the bytes that `decode` understands."""
        body = bytearray()
        for report in self.reports:
            due = report.due.to_bytes((report.due.bit_length() + 7) // 8, "little")
            order = struct.pack(f"<{len(report.order)}I", *report.order)
            body += self._REPORT.pack(
                report.participant, report.held_back, len(due), len(report.order)
            )
            body += due + order
        total = self._HEADER.size + len(body)
        return self._HEADER.pack(total, self.steps, len(self.reports)) + bytes(body)

    @classmethod
    def decode_all(cls, data: memoryview) -> Iterator[Entry]:
        """Yield the entries of the ranks, which follow one another in `data`."""
        while data:
            total, steps, count = cls._HEADER.unpack_from(data)
            yield cls(steps, tuple(cls._decode_reports(data[cls._HEADER.size : total], count)))
            data = data[total:]

    @classmethod
    def _decode_reports(cls, data: memoryview, count: int) -> Iterator[Report]:
        for _ in range(count):
            participant, held_back, due_bytes, order_count = cls._REPORT.unpack_from(data)
            data = data[cls._REPORT.size :]
            due = int.from_bytes(data[:due_bytes], "little")
            order = struct.unpack_from(f"<{order_count}I", data, due_bytes)
            data = data[due_bytes + 4 * order_count :]
            yield Report(participant, due, held_back, order)


class Participant(Protocol):
    """One optimizer's part in the reduction (:class:`torch_ring.gradients.Reducer`)."""

    settled: bool
    """Whether the last agreement left nothing to reduce before the step, on any rank."""

    def report(self, everything: bool) -> Report | None:
        """Return what is due here, with `everything` whatever there is; None: nothing to say."""

    def start(self, touched: int, number: int) -> None:
        """Start to reduce the parameters of the bitmap; `number` is the agreement's."""

    def start_bucket(self, bucket: int) -> None:
        """Start to reduce a bucket during the pass."""

    def finish(self, order: Sequence[int]) -> None:
        """Wait until they are reduced, then use rank 0's order of readiness, if there is one."""


@dataclass
class BackwardPasses:
    """All wrapped optimizers of this process in one world.

    A backward pass may touch the parameters of several optimizers (GAN), or on this rank of other
    ones than elsewhere. So each pass ends with one agreement about all of them: what has a gradient
    on any rank is reduced on all, in the order of the optimizers' indices. It costs one allgather
    of a few bytes an optimizer and a bit a parameter.

    A step must not begin before the gradients of all ranks are reduced. Usually the pass before it
    has left nothing behind anywhere, every rank knows that from the pass's agreement, and `settle`
    does nothing. Otherwise (accumulation, a rank that skipped backward) it agrees once more.

    Thread: the one that runs backward(). Blocking: until every rank has agreed.
    """

    engine: _C.Engine
    number: int = 0
    """Agreements so far: a part of the names of all that follows from the next one."""

    steps: int = 0
    _registered: int = 0
    _participants: WeakValueDictionary[int, Participant] = field(
        default_factory=WeakValueDictionary
    )

    def register(self, participant: Participant) -> int:
        """Return the participant's index. Call in the same order on all ranks."""
        index = self._registered
        self._participants[index] = participant
        self._registered += 1
        return index

    def start_bucket(self, participant: int, bucket: int) -> None:
        """Start to reduce a bucket. Called by autograd when all of it is due here."""
        self._participants[participant].start_bucket(bucket)

    def end(self) -> None:
        """End a pass. Called by autograd when a backward pass has touched a participant.

        After shutdown() this is left to the next step(), which will fail: the parameters may belong
        to an optimizer of a newer world by now.
        """
        if not world.is_initialized() or world.engine() is not self.engine:
            return
        reports = self._reports()
        if any(report.due for report in reports):
            self._agree(reports)

    def settle(self, participant: Participant) -> None:
        """Reduce whatever a rank has accumulated for `participant`, due or not."""
        while not participant.settled:
            self._agree(self._reports(stepping=participant))

    def _reports(self, stepping: Participant | None = None) -> tuple[Report, ...]:
        participants = list(self._participants.values())
        reports = [participant.report(participant is stepping) for participant in participants]
        return tuple(report for report in reports if report)

    def _agree(self, reports: tuple[Report, ...]) -> None:
        """Tell the other ranks, and reduce what is due on any of them."""
        entries = self._exchange(Entry(self.steps, reports))
        number, self.number = self.number, self.number + 1
        self._check_steps([entry.steps for entry in entries])
        touched: dict[int, int] = {}
        for report in (report for entry in entries for report in entry.reports):
            touched[report.participant] = touched.get(report.participant, 0) | report.due
        held_back = {r.participant for entry in entries for r in entry.reports if r.held_back}
        orders = {report.participant: report.order for report in entries[0].reports}
        participants = [(index, self._participant(index)) for index in sorted(touched)]
        for index, participant in participants:
            participant.start(touched[index], number)
        for index, participant in participants:
            participant.finish(orders.get(index, ()))
            participant.settled = index not in held_back

    def _exchange(self, entry: Entry) -> list[Entry]:
        mine = entry.encode()
        work = self.engine.allgather(
            torch.frombuffer(bytearray(mine), dtype=torch.uint8),
            f"backward.{self.number}",
            awaited=True,
        )
        gathered = bytes(work.wait().numpy())
        ranks = len(gathered) // len(mine)
        if gathered == mine * ranks:  # the usual case: nothing to decode
            return [entry] * ranks
        return list(Entry.decode_all(memoryview(gathered)))

    @staticmethod
    def _check_steps(steps: Sequence[int]) -> None:
        for rank, other in enumerate(steps):
            if other != steps[0]:
                raise MismatchError(
                    f"the ranks are in different steps: rank 0 has taken {steps[0]} optimizer "
                    f"steps, rank {rank} {other}. Every rank must call step() equally often, and "
                    "backward() equally often between two steps (a rank without data may leave "
                    "it out)"
                )

    def _participant(self, index: int) -> Participant:
        participant = self._participants.get(index)
        if participant is None:
            raise RingError(
                f"another rank has gradients for the wrapped optimizer {index}, which does "
                "not exist here (any more): wrap and drop optimizers alike on all ranks"
            )
        return participant


def rejoin() -> None: ...
