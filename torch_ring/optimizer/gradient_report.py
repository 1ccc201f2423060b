"""BackwardReport: a rank's message at the end of a backward pass, and its byte layout."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BackwardReport", "GradientReport"]

# The flags of a report.
_ACCUMULATING, _HAS_DIGEST, _INCOMPLETE, _STEPPING, _AGAIN, _ON_BASE = 1, 2, 4, 8, 16, 32
_DIGEST_BYTES = 8


@dataclass(frozen=True)
class GradientReport:
    """The gradients of one optimizer on one rank.

    Attributes:
        participant: the optimizer's index, the same on all ranks.
        due: the parameters to reduce now, as a bitmap (bit i is parameter i).
        sparse: those of them whose gradient is sparse here.
        accumulating: whether there are gradients that will be reduced later in this step.
        order: parameters in the order in which their gradients became ready; empty if the ranks
            know it already.
        digest: 8 bytes that follow from the weights; empty if the ranks have compared them.
        incomplete: whether there are parameters that are not due, and were not reduced since the
            step began: the program may set their gradients before it steps.
        stepping: whether the optimizer is about to step; all its gradients are due.
        again: whether some of `due` lack a part, which came when they had been sent: the ranks
            agree once more, as soon as these are reduced.
        on_base: whether some that accumulate were added to averaged ones.
    """

    participant: int
    due: int
    sparse: int = 0
    accumulating: bool = False
    order: tuple[int, ...] = ()
    digest: bytes = b""
    incomplete: bool = False
    stepping: bool = False
    again: bool = False
    on_base: bool = False


@dataclass(frozen=True)
class BackwardReport:
    """One rank's message to the others at the end of a backward pass.

    Attributes:
        steps: the sum of the steps that its optimizers have taken.
        gradients: the report of each optimizer that has gradients.
    """

    steps: int
    gradients: tuple[GradientReport, ...] = ()

    # Sizes in bytes or elements; little-endian, no padding.
    _HEADER = struct.Struct("<IQI")  # bytes in all, steps, optimizers
    # participant, flags, bytes of due and of sparse, elements of order
    _REPORT = struct.Struct("<IBIII")

    @property
    def is_of_step(self) -> bool:
        """Whether the rank is about to step, and not at the end of a pass."""
        return any(report.stepping for report in self.gradients)

    @property
    def agrees_again(self) -> bool:
        """Whether another agreement follows at once."""
        return any(report.again for report in self.gradients)

    @property
    def due(self) -> dict[int, int]:
        """The parameters to reduce now, by optimizer; without those that have none."""
        return {report.participant: report.due for report in self.gradients if report.due}

    def encode(self) -> bytes:
        """Return the bytes that `decode_all` decodes."""
        body = bytearray()
        for report in self.gradients:
            due, sparse = _encode_bitmap(report.due), _encode_bitmap(report.sparse)
            flags = _ACCUMULATING * report.accumulating | _HAS_DIGEST * bool(report.digest)
            flags |= _INCOMPLETE * report.incomplete | _STEPPING * report.stepping
            flags |= _AGAIN * report.again | _ON_BASE * report.on_base
            body += self._REPORT.pack(
                report.participant, flags, len(due), len(sparse), len(report.order)
            )
            body += due + sparse + struct.pack(f"<{len(report.order)}I", *report.order)
            body += report.digest
        total = self._HEADER.size + len(body)
        return self._HEADER.pack(total, self.steps, len(self.gradients)) + bytes(body)

    @classmethod
    def decode_all(cls, data: memoryview) -> Iterator[BackwardReport]:
        """Yield the reports of all ranks, which follow one another in `data`."""
        while data:
            report, data = cls.decode(data)
            yield report

    @classmethod
    def decode(cls, data: memoryview) -> tuple[BackwardReport, memoryview]:
        """Return the first report in `data`, and what follows it."""
        total, steps, count = cls._HEADER.unpack_from(data)
        reports = cls._decode_reports(data[cls._HEADER.size : total], count)
        return cls(steps, tuple(reports)), data[total:]

    @classmethod
    def _decode_reports(cls, data: memoryview, count: int) -> Iterator[GradientReport]:
        for _ in range(count):
            participant, flags, due_bytes, sparse_bytes, order_count = cls._REPORT.unpack_from(data)
            data = data[cls._REPORT.size :]
            due, data = data[:due_bytes], data[due_bytes:]
            sparse, data = data[:sparse_bytes], data[sparse_bytes:]
            order = struct.unpack_from(f"<{order_count}I", data)
            data = data[4 * order_count :]
            digest_bytes = _DIGEST_BYTES if flags & _HAS_DIGEST else 0
            digest, data = bytes(data[:digest_bytes]), data[digest_bytes:]
            yield GradientReport(
                participant,
                _decode_bitmap(due),
                _decode_bitmap(sparse),
                bool(flags & _ACCUMULATING),
                order,
                digest,
                bool(flags & _INCOMPLETE),
                bool(flags & _STEPPING),
                bool(flags & _AGAIN),
                bool(flags & _ON_BASE),
            )


def _encode_bitmap(bitmap: int) -> bytes:
    return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")


def _decode_bitmap(data: memoryview) -> int:
    return int.from_bytes(data, "little")
