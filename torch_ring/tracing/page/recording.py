"""read_recording: everything that a folder holds of a job."""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

from torch_ring.tracing.page.dump_reader import is_dump, read_dump
from torch_ring.tracing.page.operation import Operation, Recording
from torch_ring.tracing.page.timeline_reader import read_timeline

__all__ = ["NothingToShowError", "read_recording"]

_RANK_AT_END = re.compile(r"(\d+)(?:\.json)?$")


class NothingToShowError(ValueError):
    """There is nothing to draw, or a file is broken; the text says which and why."""


def read_recording(path: Path) -> Recording:
    """Read a timeline, a dump, or a folder of them. Where a folder has both, they are one job's.

    Raises:
        NothingToShowError: there is no such file, none with an operation, or one of two kinds
            whose clocks do not fit together.
    """
    if not path.exists():
        raise NothingToShowError(f"{path}: there is no such file or folder")
    files = [path]
    if path.is_dir():  # which may have a page from before
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
        # The timeline has all that the dumps have, and one clock; a dump has each rank's own.
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


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, lists and dictionaries: nothing in a file can run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it has a {module_name}.{global_name}, and not plain data")


def _unpickled(content: bytes) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # pickle raises anything on a broken file
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
