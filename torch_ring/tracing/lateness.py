"""stragglers: which rank the others wait for, as far as this rank has noticed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from statistics import median

from torch_ring._C import OperationRecord
from torch_ring.tracing.operations import recorded_sets

__all__ = ["Straggler", "stragglers", "who_is_late"]


@dataclass(frozen=True)
class Straggler:
    """A rank that has cost this one most of the time for which it has waited for agreements.

    Attributes:
        rank: its rank in the world.
        last: the number of waits that it ended.
        waits: the number of all waits that were looked at.
        median_s: the median of the waits that it ended, in seconds.
        operation: what was waited for most often among these. Between hosts, where buckets are
            reduced during the backward pass, the bucket that the rank had not filled. On one host
            they are reduced when the pass has ended, and that end is what is waited for.
    """

    rank: int
    last: int
    waits: int
    median_s: float
    operation: str

    def __str__(self) -> str:
        share = 100 * self.last // self.waits
        return (
            f"rank {self.rank} was last in {share} % of {self.waits} waits, by "
            f"{self.median_s * 1e3:.0f} ms in the median, most often for {self.operation}"
        )


def stragglers(min_lag_s: float = 0.01) -> list[Straggler]:
    """Return the rank for which this one has waited most, if there is such a rank; at most one.

    Every agreement has a rank that comes last. This looks at the agreements among the last 2000
    operations of each process set for which this rank has waited `min_lag_s` or more. The rank for
    which it has waited more than two thirds of that time, three times at least, is a straggler. The
    late rank itself waits for nobody, so it finds none: ask another one. Talks to no other
    rank; `report` asks all of them what they do.

    Who was last in an agreement is known with the next one, so the last agreement does not count.

    Args:
        min_lag_s: the shortest wait that counts, in seconds.

    Raises:
        NotInitializedError: before init().
    """
    found = []
    for recorded in recorded_sets():
        late = who_is_late(recorded.records, recorded.ranks, min_lag_s)
        if late is not None:
            found.append(late)
    return sorted(found, key=lambda each: -each.last)[:1]


def who_is_late(
    records: list[OperationRecord], ranks: tuple[int, ...], min_lag_s: float
) -> Straggler | None:
    """Return the straggler of one process set, of whose members `ranks` are the ranks."""
    waits: dict[int, OperationRecord] = {}  # by round: its operations were agreed on together
    for record in records:
        if record.sequence and record.last_rank >= 0 and record.lag_ns >= min_lag_s * 1e9:
            waits.setdefault(record.round, record)
    waited: Counter[int] = Counter()  # ns, by the rank that was last
    for record in waits.values():
        waited[record.last_rank] += record.lag_ns
    if not waited:
        return None
    ((rank, ns),) = waited.most_common(1)
    its = [record for record in waits.values() if record.last_rank == rank]
    if len(its) < 3 or 3 * ns <= 2 * waited.total():
        return None
    ((operation, _),) = Counter(_title(record) for record in its).most_common(1)
    return Straggler(
        ranks[rank], len(its), len(waits), median(record.lag_ns for record in its) / 1e9, operation
    )


def _title(record: OperationRecord) -> str:
    """Return what is the same in every backward pass: the number of the pass is left out."""
    bucket = re.fullmatch(r"gradients\.(\d+)\.\d+\.(\d+)\.\d+", record.name)
    if bucket is not None:
        return f"bucket {bucket[2]} of optimizer {bucket[1]}"
    if re.fullmatch(r"backward\.\d+", record.name):
        return "the end of a backward pass"
    return record.operation if record.name.startswith("#") else record.description
