# SPDX-License-Identifier: Apache-2.0
"""read_recording: reads the timelines and dumps of a job from a folder."""

from __future__ import annotations

import contextlib
import io
import json
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "KINDS",
    "NothingToShowError",
    "Operation",
    "Recording",
    "events_of",
    "read_recording",
    "step_of",
]

# backward.7, backward.7.weights, gradients.0.7.2.1048576 (csrc/engine/request.h)
_STEP = re.compile(r"(?:backward|gradients\.\d+)\.(\d+)(?:\.|$)")


@dataclass(slots=True)
class Operation:
    """A collective on one rank. Times are in microseconds since the recording's beginning.

    It waits for the other ranks between `submitted` and `started`, and moves data between `started`
    and `finished`. A time that was not recorded is replaced by the next recorded one; an unfinished
    operation ends with the recording.
    """

    rank: int
    kind: str  # allreduce, broadcast, ...
    name: str
    process_set: str
    sequence: int  # number in its process set, the same on all ranks; -1: unknown
    bytes: int
    submitted: float
    started: float
    finished: float
    dtype: str = ""
    shape: str = ""
    state: str = "completed"
    error: str = ""  # of a failed operation


@dataclass
class Recording:
    """The operations of all ranks, in the order of their submission, and their sources."""

    operations: list[Operation]
    ranks: list[int]
    sources: list[str]
    notes: list[str]  # notes about the data for the reader of the page


def step_of(name: str) -> int | None:
    """Return the number of the backward pass in an operation's name, from 0 on."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


_NEGOTIATE = "NEGOTIATE_"
_FIRST = 1  # the trace's process id of rank 0: csrc/timeline/chrome_trace.h


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace: an array, even an unfinished one, or an object.

    Raises:
        ValueError: the text is no Chrome trace.
    """
    try:
        trace = json.loads(text)
    except ValueError:
        trace = _unfinished(text)
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("neither a list of events, nor an object with traceEvents")
    return events


def _unfinished(text: str) -> Any:
    """Return the events of an array whose writer was killed: only its last line is incomplete."""
    lines = text.rstrip().splitlines()
    for whole in (lines, lines[:-1]):
        with contextlib.suppress(ValueError):
            return json.loads("\n".join(whole).rstrip().rstrip(",") + "]")
    raise ValueError("no JSON, also not an array that lacks its end")


def read_timeline(text: str) -> list[Operation]:
    """Return the operations of a timeline that torch_ring has written (docs/timeline.md).

    Raises:
        ValueError: it is no Chrome trace, or an event lacks a required field.
    """
    operations = []
    negotiated: dict[tuple[Any, ...], float] = {}
    for event in events_of(text):
        args = event.get("args")
        if event.get("ph") != "X" or not isinstance(args, dict) or "tensor" not in args:
            continue
        try:
            name, rank = str(event["name"]), int(event["pid"]) - _FIRST
            begin, duration = float(event["ts"]), float(event.get("dur", 0))
            key = (rank, args.get("process_set", 0), args["sequence"], args["tensor"])
            if name.startswith(_NEGOTIATE):
                negotiated[key] = begin
                continue
            operations.append(
                Operation(
                    rank=rank,
                    kind=name.lower(),
                    name=str(args["tensor"]).removeprefix(f"{name.lower()}."),
                    process_set=str(args.get("process_set", 0)),
                    sequence=int(args["sequence"]),
                    bytes=int(args.get("bytes", 0)),
                    submitted=negotiated.pop(key, begin),
                    started=float(args.get("started", begin)),
                    finished=begin + duration,
                    dtype=str(args.get("dtype", "")),
                    shape=json.dumps(args["shape"]) if "shape" in args else "",
                    state=str(args.get("state", "completed")),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the event {json.dumps(event)[:200]} is wrong: {error!r}") from None
    return operations


# torch's names of collectives -> ours.
KINDS = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "_all_gather_base": "allgather",
    "all_to_all": "alltoall",
    "reduce_scatter": "reducescatter",
    "_reduce_scatter_base": "reducescatter",
}
_BITS = {"Float": 32, "Double": 64, "Half": 16, "BFloat16": 16, "Long": 64, "Int": 32, "Short": 16}
_NANOSECONDS = 1e-3  # in microseconds


def is_dump(value: Any) -> bool:
    """Return whether a value is a dump: an object with entries and a format version."""
    return isinstance(value, Mapping) and "entries" in value and "version" in value


def read_dump(dump: Mapping[str, Any], rank: int) -> list[Operation]:
    """Return the operations of one rank's dump; their times are microseconds since 1970.

    Raises:
        ValueError: an entry lacks a required field.
    """
    operations: list[Operation] = []
    last = float(dump.get("written_ns", 0)) * _NANOSECONDS  # torch's own dumps lack it
    for entry in dump["entries"]:
        try:
            operation = _operation(entry, rank)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"an entry of the dump is wrong: {error!r}") from None
        operations.append(operation)
        known = (operation.submitted, operation.started, operation.finished)
        last = max(last, *(time for time in known if not math.isnan(time)))
    for operation in operations:  # unfinished operations end with the dump
        if math.isnan(operation.started):
            operation.started = last if math.isnan(operation.finished) else operation.finished
        if math.isnan(operation.finished):
            operation.finished = last
    return operations


def _operation(entry: Mapping[str, Any], rank: int) -> Operation:
    title = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    kind = title.split()[0]
    sizes, dtypes = entry.get("input_sizes") or [[]], entry.get("input_dtypes") or [""]
    bytes_ = sum(
        math.prod(size) * _size_of(dtype) for size, dtype in zip(sizes, dtypes, strict=False)
    )
    group = entry["process_group"]
    ours: Mapping[str, Any] = entry.get("ring") or {}  # fields that torch's recorder lacks
    started, finished = (
        entry.get("time_discovered_started_ns"),
        entry.get("time_discovered_completed_ns"),
    )
    has_failed = ours.get("state") == "failed"  # torch has no such state
    if has_failed:
        finished = ours.get("ended_ns")
    return Operation(
        rank=rank,
        kind=KINDS.get(kind, kind),
        name=str(ours.get("name") or f"{kind} {entry['collective_seq_id']}"),
        process_set=str(group[0] if isinstance(group, list | tuple) else group),
        sequence=int(entry["collective_seq_id"]),
        bytes=int(ours.get("bytes", bytes_)),
        submitted=float(entry["time_created_ns"]) * _NANOSECONDS,
        started=math.nan if started is None else float(started) * _NANOSECONDS,
        finished=math.nan if finished is None else float(finished) * _NANOSECONDS,
        dtype=str(dtypes[0]) if dtypes else "",
        shape=str(sizes[0]) if sizes else "",
        state="failed" if has_failed else str(entry.get("state", "")),
        error=str(ours.get("error") or ""),
    )


def _size_of(dtype: str) -> int:
    """Return the bytes of an element, for torch's name (Float) or ours (float32)."""
    if dtype in _BITS:
        return _BITS[dtype] // 8
    digits = "".join(c for c in dtype.removeprefix("b") if c.isdigit())
    return int(digits) // 8 if digits else 1


_RANK_AT_END = re.compile(r"(\d+)(?:\.json)?$")


class NothingToShowError(ValueError):
    """There is nothing to draw, or a file is broken; the text names the file and the reason."""


def read_recording(path: Path) -> Recording:
    """Read a timeline, a dump, or a folder of them. Both in a folder are taken for one job's.

    Raises:
        NothingToShowError: there is no such file, or none with an operation, or the clocks of the
            files do not fit together.
    """
    if not path.exists():
        raise NothingToShowError(f"{path}: there is no such file or folder")
    files = [path]
    if path.is_dir():  # it may have an older page
        files = sorted(f for f in path.iterdir() if f.is_file() and f.suffix != ".html")
    timelines: list[Operation] = []
    dumps: list[Operation] = []
    sources: list[str] = []
    notes: list[str] = []
    for file in files:
        try:
            of_timeline, of_dump = _read(file)
        except ValueError as error:
            if file == path:
                raise NothingToShowError(f"{file}: {error}") from None
            notes.append(f"{file.name} was left out: {error}")
            continue
        timelines += of_timeline
        dumps += of_dump
        if of_timeline or of_dump:
            sources.append(file.name)
    if timelines and dumps:
        # The timeline has all the data of the dumps on one clock; each dump has its rank's clock.
        notes.append("drawn from the timeline; the flight-recorder dumps beside it were left out")
    operations = timelines or dumps
    if not operations:
        listed = f": {'; '.join(notes)}" if notes else ""
        raise NothingToShowError(
            f"{path} has no timeline (TORCH_RING_TIMELINE) and no flight-recorder dump with an "
            f"operation in it{listed}"
        )
    if not timelines:
        notes.append("times of dumps are those of each host's own clock")
    begin = min(each.submitted for each in operations)
    for each in operations:
        each.submitted -= begin
        each.started = max(each.started - begin, each.submitted)
        each.finished = max(each.finished - begin, each.started)
    operations.sort(key=lambda each: (each.submitted, each.rank))
    return Recording(operations, sorted({each.rank for each in operations}), sources, notes)


class _DumpUnpickler(pickle.Unpickler):
    """Reads numbers, strings, lists and dictionaries: nothing in a file can run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it has a {module_name}.{global_name}, and not plain data")


def _unpickled(content: bytes) -> Any:
    try:
        return _DumpUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a broken pickle may raise any error
        raise ValueError(f"no dump: {error}") from None


def _read(file: Path) -> tuple[list[Operation], list[Operation]]:
    """Return the operations of a file: those of a timeline, and those of a dump."""
    content = file.read_bytes()
    if content.startswith(pickle.PROTO):
        value = _unpickled(content)
        if not is_dump(value):
            raise ValueError("a pickle that is no dump")
        text = ""
    else:
        text = content.decode(errors="replace")
        try:
            value = json.loads(text) if text.lstrip().startswith("{") else None
        except ValueError as error:
            raise ValueError(f"no JSON: {error}") from None
    if is_dump(value):
        rank = value.get("rank")
        if rank is None:
            match = _RANK_AT_END.search(file.name)
            if match is None:
                raise ValueError("a dump whose file name does not end with a rank's number")
            rank = match[1]
        return [], read_dump(value, int(rank))
    return read_timeline(text), []
