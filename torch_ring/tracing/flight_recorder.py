# SPDX-License-Identifier: Apache-2.0
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
from torch_ring._C import COLLECTIVES, MessageRecord, OperationRecord
from torch_ring.tracing.lateness import answer_questions, main_thread_stack
from torch_ring.tracing.operations import RecordedSet, own_rank, recorded_sets
from torch_ring.world import current
from torch_ring.world.recorded import recorded_groups

__all__ = ["dump", "trace_process"]

_VERSION = "2.10"  # of the format

_TORCHS_NAMES = {each.name: each.torch for each in COLLECTIVES}
_STATES = {
    "submitted": "scheduled",
    "agreed": "scheduled",
    "started": "started",
    "finished": "completed",
    "failed": "scheduled",
}

# The analyser matches operations by number. An operation without an agreement has no common number,
# so it gets one derived from its name, above all others except those of launches.
_UNDECIDED = 1 << 40
# torch numbers the records of all groups together, but here each set counts its own. A set's
# numbers lie above the world's, so that the analyser drops none as older than other ranks' records.
_PER_SET = 1 << 48

_Wall = Callable[[int], "int | None"]
"""Converts a record's time to nanoseconds since the epoch; None: there is no time."""


def to_torch(
    sets: Sequence[RecordedSet], frames: Sequence[dict[str, Any]], rank: int
) -> dict[str, Any]:
    """Return these operations in the format of torch's flight recorder.

    Args:
        sets: the recorded operations, the world's first.
        frames: the stack of the main thread, innermost first, each with name, filename and line.
        rank: the rank of this process in the world.
    """
    now_ns = time.time_ns()
    offset_ns = now_ns - time.monotonic_ns()

    def wall(ns: int) -> int | None:
        return ns + offset_ns if ns else None

    entries = []
    for recorded in sets:
        last = max((record.number for record in recorded.records), default=0)
        for record in sorted(recorded.records, key=_sequence):
            # The main thread is probably in an operation in flight, or where the last one failed.
            is_here = not record.finished_ns or (record.state == "failed" and record.number == last)
            entries.append(_entry(recorded, record, wall, frames if is_here else ()))
    return {
        "version": _VERSION,
        "rank": rank,
        "written_ns": now_ns,
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
        # Torch's analyser (2.14) takes every entry for an operation of all ranks of its group: for
        # a message between two of three ranks, it would report the third as missing.
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
        # The analyser knows only torch's backends. Operations on the host are named as gloo's.
        "profiling_name": f"{'nccl' if record.transport == 'nccl' else 'gloo'}:"
        f"{_TORCHS_NAMES[record.operation]}",
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
            "ended_ns": wall(record.finished_ns),  # also of a failed operation
            "last_rank": recorded.ranks[record.last_rank] if record.last_rank >= 0 else None,
            "lag_ms": record.lag_ns / 1e6,
            "error": record.error,
        },
    }


def _shapes(record: OperationRecord, size: int) -> tuple[list[int], list[int]]:
    """Return the input and output sizes, in a form that passes the analyser's checks.

    The analyser assumes equal sizes on all ranks: an allgather of unequal rows is given as one row
    of each rank, and a reducescatter that does not divide evenly is rounded up.
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

    Call it on any rank, at any time, even while operations are in flight; it waits for no other
    rank. ``torchfrtrace FOLDER`` compares the files of all ranks in a folder: it names the first
    operation that differs, and the ranks that are missing from it.

    Args:
        path: a folder, which is made, for the file ``flight_RANK``; or a file: its name has a
            suffix, or ends in ``_RANK``. A file whose name ends in ``.json`` is written as JSON
            with the same fields; any other in the format of torch's flight recorder, a pickle of
            plain lists and dictionaries.

    Returns:
        The path of the file. Readers never see a partial file.

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


# --- automatic dumps, in a folder named by the user


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
    """Write a dump; return the note about it for the text of an error."""
    folder = _folder()
    if folder is None:
        return ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return f"{errors.NOTE}are in {dump(folder)}]"
    except Exception as error:  # it must not hide the first error
        return f"{errors.NOTE}could not be written: {error}]"


def _handle_signal() -> None:
    handle_signal(current.config().flight_dir)


def handle_signal(folder: str) -> None:
    """Write a dump on SIGUSR2 from now on, if there is a folder and the program has no handler."""
    if not folder or not hasattr(signal, "SIGUSR2"):  # Windows
        return
    try:
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR2, _on_signal)
    except ValueError:  # init() was not called in the main thread
        _log.warning("SIGUSR2 writes no dump: init() was not called in the main thread")


def _on_signal(_number: int, _frame: object) -> None:
    folder = _folder()
    if folder is not None:
        _log.info("SIGUSR2%s", _note())


def trace_process(flight_dir: str = "") -> None:
    """From now on, write dumps of errors and answer other ranks' questions. Idempotent.

    Args:
        flight_dir: TORCH_RING_FLIGHT_DIR of a group of torch.distributed; empty for ``init()``.
    """
    watch_errors()
    handle_signal(flight_dir)
    answer_questions()
