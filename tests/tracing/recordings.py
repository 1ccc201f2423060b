# SPDX-License-Identifier: Apache-2.0
"""Made-up timelines and dumps with known numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MILLISECOND = 1000.0  # in microseconds


def timeline_events(steps: int, ranks: int = 2, late_rank: int = 1) -> list[dict[str, Any]]:
    """Return the events of steps 20 ms apart, each with a report and two buckets.

    `late_rank` comes 5 ms after the others; the buckets of 4 MiB and 1 MiB move 4 GiB a second.
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank + 1, "args": {"name": f"rank {rank}"}}
        for rank in range(ranks)
    ]
    for step in range(steps):
        begin = step * 20 * MILLISECOND
        ready = begin + 5 * MILLISECOND
        for number, (kind, name, size) in enumerate(
            [
                ("ALLGATHER", f"backward.{step}", 64),
                ("ALLREDUCE", f"gradients.0.{step}.0.0", 4 << 20),
                ("ALLREDUCE", f"gradients.0.{step}.1.1048576", 1 << 20),
            ]
        ):
            duration = size / (4 << 30) * 1e6
            for rank in range(ranks):
                came = ready if rank == late_rank else begin
                args = {
                    "tensor": f"{kind.lower()}.{name}",
                    "sequence": 3 * step + number,
                    "process_set": 0,
                    "bytes": size,
                    "dtype": "float32",
                    "shape": [size // 4],
                }
                place = {"ph": "X", "pid": rank + 1, "tid": number + 1, "args": args}
                wait = {"name": f"NEGOTIATE_{kind}", "ts": came, "dur": ready - came}
                events += [place | wait, place | {"name": kind, "ts": ready, "dur": duration}]
            ready += duration
    return events


def write_timeline(path: Path, events: list[dict[str, Any]]) -> Path:
    """Write a timeline as torch_ring does: one event a line."""
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    return path


def dump_of(rank: int, late_by_ms: int = 0) -> dict[str, Any]:
    """Return a flight-recorder dump with one ended operation and one unfinished one."""
    second = 1_700_000_000_000_000_000
    created = second + late_by_ms * 1_000_000
    entry = {
        "profiling_name": "gloo:all_reduce",
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "record_id": 0,
        "process_group": ["0", "default"],
        "input_sizes": [[1024, 4]],
        "output_sizes": [[1024, 4]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "time_created_ns": created,
        "time_discovered_started_ns": second + 8_000_000,
        "time_discovered_completed_ns": second + 9_000_000,
        "state": "completed",
    }
    waiting = entry | {
        "collective_seq_id": 2,
        "record_id": 1,
        "time_created_ns": second + 9_500_000,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "state": "scheduled",
    }
    return {"version": "2.10", "rank": rank, "pg_config": {}, "entries": [entry, waiting]}


def failed_dump() -> dict[str, object]:
    """Return a dump whose second operation has failed 0.5 ms after it was asked for."""
    dump = dump_of(rank=0)
    failed = dump["entries"][1]
    failed["ring"] = {
        "name": "loss",
        "state": "failed",
        "ended_ns": failed["time_created_ns"] + 500_000,
        "error": "rank 0: the ranks <disagree>",
    }
    dump["entries"].append(failed | {"collective_seq_id": 3, "ring": {"name": "later"}})
    dump["entries"][2]["time_created_ns"] += 9_000_000
    return dump
