"""What a rank says about its gradients at the end of a backward pass, and how it is sent."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Entry", "Report"]


@dataclass(frozen=True)
class Report:
    """What one rank says about the gradients of one optimizer.

    Attributes:
        participant: the optimizer's index, the same on all ranks.
        due: the parameters to reduce now, as a bitmap (bit i is parameter i).
        sparse: those of them whose gradient is sparse here.
        held_back: whether there are gradients that are to be reduced later in this step.
        order: parameters in the order in which their gradients became ready, if that is news.
    """

    participant: int
    due: int
    sparse: int = 0
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
    # participant, held_back, bytes of due and of sparse, elements of order
    _REPORT = struct.Struct("<I?III")

    def encode(self) -> bytes:
        """Return the bytes that `decode_all` understands."""
        body = bytearray()
        for report in self.reports:
            due, sparse = _encode_bitmap(report.due), _encode_bitmap(report.sparse)
            body += self._REPORT.pack(
                report.participant, report.held_back, len(due), len(sparse), len(report.order)
            )
            body += due + sparse + struct.pack(f"<{len(report.order)}I", *report.order)
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
            participant, held_back, due_bytes, sparse_bytes, order_count = cls._REPORT.unpack_from(
                data
            )
            data = data[cls._REPORT.size :]
            due, data = data[:due_bytes], data[due_bytes:]
            sparse, data = data[:sparse_bytes], data[sparse_bytes:]
            order = struct.unpack_from(f"<{order_count}I", data)
            data = data[4 * order_count :]
            yield Report(participant, _decode_bitmap(due), _decode_bitmap(sparse), held_back, order)


def _encode_bitmap(bitmap: int) -> bytes:
    return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")


def _decode_bitmap(data: memoryview) -> int:
    return int.from_bytes(data, "little")
