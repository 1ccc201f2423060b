"""read_dump: the operations in a dump of a flight recorder, torch_ring's or torch's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch_ring.tracing.page.operation import Operation

__all__ = ["is_dump", "read_dump"]

# torch's words for collectives, in ours.
_KINDS = {
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
    """Return whether this is a dump: an object with entries and the version of their format."""
    return isinstance(value, Mapping) and "entries" in value and "version" in value


def read_dump(dump: Mapping[str, Any], rank: int) -> list[Operation]:
    """Return the operations of one rank's dump; their times are microseconds since 1970.

    Raises:
        ValueError: an entry lacks what it must have.
    """
    operations: list[Operation] = []
    last = 0.0
    for entry in dump["entries"]:
        try:
            operation = _operation(entry, rank)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"an entry of the dump is wrong: {error!r}") from None
        operations.append(operation)
        known = (operation.submitted, operation.started, operation.finished)
        last = max(last, *(time for time in known if not math.isnan(time)))
    for operation in operations:  # what has not ended, ends with the recording
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
    ours: Mapping[str, Any] = entry.get("ring") or {}  # what torch's recorder does not have
    started, finished = (
        entry.get("time_discovered_started_ns"),
        entry.get("time_discovered_completed_ns"),
    )
    has_failed = ours.get("state") == "failed"  # torch has no word for it
    if has_failed:
        finished = ours.get("ended_ns")
    return Operation(
        rank=rank,
        kind=_KINDS.get(kind, kind),
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
    """Return the bytes of an element of torch's Float or of our float32."""
    if dtype in _BITS:
        return _BITS[dtype] // 8
    digits = "".join(c for c in dtype.removeprefix("b") if c.isdigit())
    return int(digits) // 8 if digits else 1
