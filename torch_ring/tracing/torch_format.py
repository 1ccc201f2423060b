"""to_torch: records in the form of torch's flight recorder, which ``torchfrtrace`` reads.

The fields are those that ``torch/distributed/flight_recorder/components/builder.py`` lists.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from torch_ring._C import MessageRecord, OperationRecord
from torch_ring.tracing.operations import RecordedSet

__all__ = ["to_torch"]

_VERSION = "2.10"  # of the format

_COLLECTIVES = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "fence": "barrier",
    "join": "barrier",
}
_STATES = {
    "submitted": "scheduled",
    "agreed": "scheduled",
    "started": "started",
    "finished": "completed",
    "failed": "scheduled",
}

# An operation without an agreement has no number on which the ranks agree. The analyser matches by
# number, so it gets one that follows from its name, above all others but those of launches.
_UNDECIDED = 1 << 40
# torch counts the records of all groups together, the ranks of another set do not: its numbers lie
# above the world's, so that the analyser drops none of them as older than what other ranks have.
_PER_SET = 1 << 48

_Wall = Callable[[int], "int | None"]
"""From a record's time to nanoseconds since the epoch; None if there is none."""


def to_torch(
    sets: Sequence[RecordedSet], frames: Sequence[dict[str, Any]], rank: int
) -> dict[str, Any]:
    """Return what torch's flight recorder would have written of these operations.

    Args:
        sets: what has been recorded, the world first.
        frames: the stack of the main thread, innermost first, each with name, filename and line.
        rank: of this process in the world.
    """
    offset_ns = time.time_ns() - time.monotonic_ns()

    def wall(ns: int) -> int | None:
        return ns + offset_ns if ns else None

    entries = []
    for recorded in sets:
        last = max((record.number for record in recorded.records), default=0)
        for record in sorted(recorded.records, key=_sequence):
            # The main thread is in an operation in flight, as far as anybody can tell; or it is
            # where the last one has failed.
            is_here = not record.finished_ns or (record.state == "failed" and record.number == last)
            entries.append(_entry(recorded, record, wall, frames if is_here else ()))
    return {
        "version": _VERSION,
        "rank": rank,
        "pg_config": {
            str(each.set_id): {
                "name": str(each.set_id),
                "desc": each.name,
                "ranks": str(list(each.ranks)),
            }
            for each in sets
        },
        "pg_status": {str(each.set_id): _status(each) for each in sets},
        "entries": entries,
        # Torch's analyser (2.14) takes every entry for an operation of all ranks of its group: a
        # message between two of three would be one that a rank has missed.
        "messages": [
            _message(recorded, message, wall) for recorded in sets for message in recorded.messages
        ],
        "main_thread": list(frames),
    }


def _sequence(record: OperationRecord) -> int:
    key = f"{record.operation}.{record.name}"
    if record.name.startswith("#"):  # numbered: matched by the number alone
        key = record.name
    return record.sequence or _UNDECIDED + zlib.crc32(key.encode())


def _status(recorded: RecordedSet) -> dict[str, int]:
    def last(states: tuple[str, ...]) -> int:
        agreed = (r for r in recorded.records if not r.is_launched)
        return max((r.sequence for r in agreed if r.state in states), default=-1)

    return {
        "last_enqueued_collective": last(("agreed", "started", "finished", "failed")),
        "last_started_collective": last(("started", "finished")),
        "last_completed_collective": last(("finished",)),
    }


def _message(recorded: RecordedSet, message: MessageRecord, wall: _Wall) -> dict[str, Any]:
    return {
        "process_group": (str(recorded.set_id), recorded.name),
        "number": message.number,
        "direction": "send" if message.is_send else "receive",
        "peer": recorded.ranks[message.peer] if message.peer >= 0 else None,
        "tag": message.tag,
        "dtype": message.dtype,
        "bytes": message.bytes,
        "state": message.state,
        "time_posted_ns": wall(message.posted_ns),
        "time_matched_ns": wall(message.matched_ns),
        "time_finished_ns": wall(message.finished_ns),
        "error": message.error,
    }


def _entry(
    recorded: RecordedSet,
    record: OperationRecord,
    wall: _Wall,
    frames: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    sequence = _sequence(record)
    state = _STATES[record.state]
    input_shape, output_shape = _shapes(record, len(recorded.ranks))
    moves = record.operation not in ("barrier", "fence", "join")
    started_ns = record.started_ns or (record.agreed_ns if state == "completed" else 0)

    return {
        "record_id": recorded.set_id * _PER_SET + sequence,
        "pg_id": recorded.set_id,
        "process_group": (str(recorded.set_id), recorded.name),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": record.number,
        # The analyser knows the backends of torch alone. Those on the host are like gloo's.
        "profiling_name": f"{'nccl' if record.transport == 'nccl' else 'gloo'}:"
        f"{_COLLECTIVES[record.operation]}",
        "time_created_ns": wall(record.submitted_ns),
        "input_sizes": [input_shape],
        "input_dtypes": [record.dtype if moves else "none"],
        "output_sizes": [output_shape],
        "output_dtypes": [record.dtype if moves else "none"],
        "state": state,
        "time_discovered_started_ns": wall(started_ns),
        "time_discovered_completed_ns": wall(record.finished_ns) if state == "completed" else None,
        "duration_ms": (record.finished_ns - started_ns) / 1e6 if state == "completed" else None,
        "retired": record.state in ("finished", "failed"),
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": list(frames),
        # What torch does not have:
        "ring": {
            "name": record.name,
            "description": record.description,
            "state": record.state,
            "transport": record.transport,
            "bytes": record.bytes,
            "reduce_op": record.reduce_op,
            "round": record.round,
            "is_launched": record.is_launched,
            "agreed_ns": wall(record.agreed_ns),
            "ended_ns": wall(record.finished_ns),  # also where it has failed
            "last_rank": recorded.ranks[record.last_rank] if record.last_rank >= 0 else None,
            "lag_ms": record.lag_ns / 1e6,
            "error": record.error,
        },
    }


def _shapes(record: OperationRecord, size: int) -> tuple[list[int], list[int]]:
    """Return input and output as the analyser checks them against one another.

    It does not know of ranks that give or get more than others: an allgather of unequal rows is one
    row of each rank here, and a reducescatter that does not divide evenly is rounded up.
    """
    shape = list(record.shape)
    if record.operation in ("barrier", "fence", "join"):
        return [], []
    if record.operation in ("allgather", "gather"):
        return shape, [size, *shape]
    if record.operation == "scatter":
        return [size, *shape], shape
    if record.operation == "reducescatter" and shape:
        rows = math.ceil(shape[0] / size)
        return [rows * size, *shape[1:]], [rows, *shape[1:]]
    return shape, shape
