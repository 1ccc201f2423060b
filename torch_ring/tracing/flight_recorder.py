"""dump, watch_errors: the last operations of this rank, in a file that ``torchfrtrace`` reads."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import signal
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_ring import errors
from torch_ring._C import MessageRecord, OperationRecord
from torch_ring.tracing.lateness import answer_questions, main_thread_stack
from torch_ring.tracing.operations import RecordedSet, own_rank, recorded_sets
from torch_ring.world import current
from torch_ring.world.recorded import recorded_groups

__all__ = ["dump", "trace_process"]

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
        # Fields that torch does not have:
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


_log = logging.getLogger("torch_ring")

_PREFIX = "flight_"  # torchfrtrace wants a common prefix and the rank


def dump(path: str | os.PathLike[str]) -> Path:
    """Write the last 2000 operations of this rank, in each process set and group.

    Call it on any rank, at any time, also while operations are in flight; it waits for nobody. A
    file of all ranks in one folder is what ``torchfrtrace FOLDER`` compares: it names the first
    operation that differs, and the ranks that are missing from it.

    Args:
        path: a folder, which is made, for ``flight_RANK`` in it; or a file: its name has a suffix,
            or ends in ``_RANK``. A name that ends in ``.json`` is written as JSON with the same
            fields; any other as torch's flight recorder writes its own, a pickle of plain lists and
            dictionaries.

    Returns:
        The file that was written. Readers never see half of it.

    Raises:
        NotInitializedError: before init(), and without a connected group of the backend ring.
        OSError: the file cannot be written.
    """
    target, rank = Path(path), own_rank()
    content = to_torch(recorded_sets(), main_thread_stack(), rank)
    if not target.suffix and not target.name.endswith(f"_{rank}") and not target.is_file():
        target.mkdir(exist_ok=True)  # another rank may make it, too
    if target.is_dir():
        target = target / f"{_PREFIX}{rank}"
    _write(target, content)
    return target


def _write(target: Path, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode() if target.suffix == ".json" else pickle.dumps(content)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".unfinished")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


# --- without being asked: in a folder that the user has named


def watch_errors() -> None:
    """From now on, write a dump on each RingError and on SIGUSR2, if there is a folder.

    The folder is TORCH_RING_FLIGHT_DIR of the current world, or of a group of torch.distributed.
    Without it no file is written and no signal handler installed.
    """
    errors.add_to_texts(_note)
    current.after_join(_handle_signal)


def _folder() -> Path | None:
    world = current.find_world()
    named = [world.config.flight_dir] if world is not None else []
    named += [group.flight_dir for group in recorded_groups()]
    return next((Path(each) for each in named if each), None)


def _note() -> str:
    """Write a dump; return what the text of an error says of it."""
    folder = _folder()
    if folder is None:
        return ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return f"{errors.NOTE}are in {dump(folder)}]"
    except Exception as error:  # the first error is the one to tell
        return f"{errors.NOTE}could not be written: {error}]"


def _handle_signal() -> None:
    handle_signal(current.config().flight_dir)


def handle_signal(folder: str) -> None:
    """Write a dump on SIGUSR2 from now on, if there is a folder and the program has no handler."""
    if not folder:
        return
    try:
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR2, _on_signal)
    except ValueError:  # init() in another thread than the main one
        _log.warning("SIGUSR2 writes no dump: init() was not called in the main thread")


def _on_signal(_number: int, _frame: object) -> None:
    folder = _folder()
    if folder is not None:
        _log.info("SIGUSR2%s", _note())


def trace_process(flight_dir: str = "") -> None:
    """From now on, write dumps of errors and answer other ranks' questions. Once more does nothing.

    Args:
        flight_dir: TORCH_RING_FLIGHT_DIR of a group of torch.distributed; ``init()`` tells its own.
    """
    watch_errors()
    handle_signal(flight_dir)
    answer_questions()
