# SPDX-License-Identifier: Apache-2.0
"""stragglers, report: the rank for which the others wait, and the present place of all ranks."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch_ring._C import MessageRecord, OperationRecord
from torch_ring.setup.connect import answer_with
from torch_ring.tracing.operations import asked_world, recorded_sets

__all__ = [
    "RankReport",
    "Straggler",
    "answer_questions",
    "main_thread_stack",
    "report",
    "stragglers",
]


@dataclass(frozen=True)
class Straggler:
    """The rank that has caused most of this rank's waiting time in agreements.

    Attributes:
        rank: its rank in the world.
        last: the number of waits that it ended.
        waits: the number of all waits considered.
        median_s: the median of the waits that it ended, in seconds.
        operation: the most frequent operation among these waits. Between hosts, buckets are reduced
            during the backward pass, and it may be the bucket that the rank had not filled. On one
            host they are reduced after the pass, and it is the end of the pass.
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
    """Return the rank for which this one has waited most: a list of one straggler, or an empty one.

    Every agreement has a rank that comes last. This considers the agreements among the last 2000
    operations of each process set for which this rank has waited `min_lag_s` or more. A rank that
    was last in at least three of them, and caused more than two thirds of that time, is a
    straggler. The late rank itself never waits, so it finds none: call this on another rank. It
    talks to no other rank; `report` asks all ranks for their present operations.

    The last rank of an agreement becomes known with the next one, so the last agreement does not
    count.

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
    """Return the straggler of one process set, whose members are `ranks`."""
    waits: dict[int, OperationRecord] = {}  # by round, whose operations were agreed on together
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
    """Return the operation's name without the number of its backward pass."""
    bucket = re.fullmatch(r"gradients\.(\d+)\.\d+\.(\d+)\.\d+", record.name)
    if bucket is not None:
        return f"bucket {bucket[2]} of optimizer {bucket[1]}"
    if re.fullmatch(r"backward\.\d+", record.name):
        return "the end of a backward pass"
    return record.operation if record.name.startswith("#") else record.description


def main_thread_stack() -> list[dict[str, Any]]:
    """Return the frames of the main thread, innermost first: name, filename and line.

    Innermost frames of torch_ring itself are left out, to show the program's place.
    """
    identity = threading.main_thread().ident
    frame = sys._current_frames().get(identity) if identity is not None else None
    frames: list[dict[str, Any]] = []
    while frame is not None:  # without I/O: meanwhile a returned frame would keep its objects alive
        code = frame.f_code
        frames.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    while len(frames) > 1 and str(frames[0]["filename"]).startswith(_FOLDER):
        del frames[0]
    return frames


_FOLDER = __file__.rsplit("tracing", 1)[0]


_MOST_BYTES = 4000  # of an answer: a control message holds 4096
_MOST_IN_FLIGHT = 3


@dataclass(frozen=True)
class RankReport:
    """The operations of one rank, and the place of its main thread.

    Attributes:
        rank: its rank in the world.
        text: its operations in flight, and the place of its main thread, innermost call first; None
            if it has not answered.
    """

    rank: int
    text: str | None

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text or 'has not answered'}"


def report(timeout_s: float = 5.0) -> list[RankReport]:
    """Ask all ranks for their present operations; return the answers by rank. Call it on any rank.

    In a program of torch.distributed that has not called ``init()``, the ranks are those of the
    largest group of the backend ring.

    Ranks answer in a separate thread, over their control connections, even if they wait in a
    collective, for data, or for a lock. A rank that is stopped, or runs native code that holds the
    interpreter's lock, may answer too late. The answers describe the present moment; ``dump()``
    writes more of the past, of one rank.

    Args:
        timeout_s: seconds to wait for the ranks' answers.

    Raises:
        NotInitializedError: there is no world, and no connected group of the backend ring.
    """
    world, names = asked_world()
    ranks = [rank for rank in range(world.size) if rank != world.rank]
    answers = world.queries.ask(ranks, timeout_s) if world.queries is not None else {}
    answers[world.rank] = what_it_does()
    return [RankReport(names[rank], answers.get(rank)) for rank in range(world.size)]


def answer_questions() -> None:
    """From now on, answer other ranks' questions about this process's activity."""
    answer_with(what_it_does)


def what_it_does() -> str:
    """Return this process's operations in flight, and the place of its main thread."""
    sets = recorded_sets()
    in_flight = [
        record.description
        for recorded in sets
        for record in recorded.records
        if not record.finished_ns
    ]
    in_flight += [
        _described(message, recorded.ranks)
        for recorded in sets
        for message in recorded.messages
        if not message.finished_ns
    ]
    text = "in no collective"
    if in_flight:
        text = "in " + ", ".join(in_flight[:_MOST_IN_FLIGHT])
        if len(in_flight) > _MOST_IN_FLIGHT:
            text += f" and {len(in_flight) - _MOST_IN_FLIGHT} more"
    text = text.encode(errors="replace")[: _MOST_BYTES // 2].decode(errors="ignore")
    return _with_places(f"{text}; its main thread is ", _places())


def _described(message: MessageRecord, ranks: Sequence[int]) -> str:
    """Return a text such as "receive of float32, 16 bytes, tag 3, from rank 2"."""
    peer = f"rank {ranks[message.peer]}" if message.peer >= 0 else "any rank"
    return f"{message.description}, {'to' if message.is_send else 'from'} {peer}"


def _places() -> list[str]:
    return [_place(frame) for frame in main_thread_stack()]


def _place(frame: dict[str, Any]) -> str:
    return f"in {frame['name']} ({frame['filename']}:{frame['line']})"


def _with_places(text: str, places: Sequence[str]) -> str:
    """Return the text with as many places as an answer has room for."""
    for i, place in enumerate(places):
        longer = f"{text}, called {place}" if i else text + place
        if len(longer.encode(errors="replace")) > _MOST_BYTES:
            return text + ", ..."
        text = longer
    return text
