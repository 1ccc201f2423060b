"""PlannedReports: the ranks' reports of planned passes, which they send without waiting."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from torch_ring._C import Engine, Work, backward_name
from torch_ring.errors import RingError
from torch_ring.optimizer.gradient_report import BackwardReport
from torch_ring.optimizer.pass_history import Gradients

__all__ = ["Entered", "PlannedReports"]

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
