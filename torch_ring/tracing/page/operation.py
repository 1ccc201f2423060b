"""Operation: one collective on one rank, as the page draws it."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Operation", "Recording", "step_of"]

# backward.7, backward.7.weights, gradients.0.7.2.1048576 (csrc/engine/request.h)
_STEP = re.compile(r"(?:backward|gradients\.\d+)\.(\d+)(?:\.|$)")


@dataclass(slots=True)
class Operation:
    """A collective on one rank. Times are in microseconds since the recording's beginning.

    It waits for the other ranks between `submitted` and `started`, and moves data between
    `started` and `finished`. Where a time was not recorded, it is the next one that was; an
    operation that has not ended, ends with the recording.
    """

    rank: int
    kind: str  # allreduce, broadcast, ...
    name: str
    process_set: str
    sequence: int  # of its process set: the same on all ranks; -1: unknown
    bytes: int
    submitted: float
    started: float
    finished: float
    dtype: str = ""
    shape: str = ""
    state: str = "completed"
    error: str = ""  # of one that has failed


@dataclass
class Recording:
    """The operations of all ranks, in the order of their submission, and where they are from."""

    operations: list[Operation]
    ranks: list[int]
    sources: list[str]
    notes: list[str]  # what the reader of the page has to know about the data


def step_of(name: str) -> int | None:
    """Return the number of the backward pass that an operation's name names, from 0 on."""
    match = _STEP.match(name)
    return int(match[1]) if match else None
