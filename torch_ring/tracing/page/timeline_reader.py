"""read_timeline: the operations in a timeline, which is a Chrome trace."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from torch_ring.tracing.page.operation import Operation

__all__ = ["events_of", "read_timeline"]

_NEGOTIATE = "NEGOTIATE_"
_FIRST = 1  # the process of rank 0: csrc/timeline/chrome_trace.h


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace: an array, also one without an end, or an object.

    Raises:
        ValueError: it is none.
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
    """Return the events of an array whose writer was killed: each line but the last is whole."""
    lines = text.rstrip().splitlines()
    for whole in (lines, lines[:-1]):
        with contextlib.suppress(ValueError):
            return json.loads("\n".join(whole).rstrip().rstrip(",") + "]")
    raise ValueError("no JSON, also not an array that lacks its end")


def read_timeline(text: str) -> list[Operation]:
    """Return the operations of a timeline that torch_ring has written (docs/timeline.md).

    Raises:
        ValueError: it is no Chrome trace, or an event lacks what it must have.
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
