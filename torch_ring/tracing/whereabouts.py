"""report: what all ranks that live are doing now, asked by one of them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ring._C import MessageRecord
from torch_ring.connections.inquiries import answer_with
from torch_ring.tracing.operations import asked_world, recorded_sets
from torch_ring.tracing.stacks import is_ours, main_thread_stack
from torch_ring.world import current

__all__ = ["RankReport", "answer_questions", "report"]

_MOST_BYTES = 4000  # of an answer: a control message has 4096
_MOST_IN_FLIGHT = 3


@dataclass(frozen=True)
class RankReport:
    """What one rank does.

    Attributes:
        rank: its rank in the world.
        text: in which operations it is, and where its main thread is, innermost call first; None
            if it has not answered.
    """

    rank: int
    text: str | None

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text or 'has not answered'}"


def report(timeout_s: float = 5.0) -> list[RankReport]:
    """Ask all ranks what they do, and return the answers by rank. Call it on any rank.

    In a program of torch.distributed that has not called ``init()``, the ranks are those of the
    largest group of the backend ring.

    Ranks answer whatever they do, over their control connections and in a thread of their own: also
    one that waits in a collective, for data, or for a lock. One that is stopped, or in native code
    that keeps the interpreter's lock, answers later than anybody waits. The answers tell of this
    moment; ``dump()`` has more of the past, of one rank.

    Args:
        timeout_s: seconds after which the ranks that have not answered are given up.

    Raises:
        NotInitializedError: there is no world, and no connected group of the backend ring.
    """
    world, names = asked_world()
    ranks = [rank for rank in range(world.size) if rank != world.rank]
    answers = world.inquiries.ask(ranks, timeout_s) if world.inquiries is not None else {}
    answers[world.rank] = what_it_does()
    return [RankReport(names[rank], answers.get(rank)) for rank in range(world.size)]


def answer_questions() -> None:
    """From now on, tell other ranks that ask what this process does."""
    answer_with(what_it_does, what_keeps_it)


def what_it_does() -> str:
    """Return in which operations this process is, and where its main thread is."""
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
    """Return "receive of float32, 16 bytes, tag 3, from rank 2"."""
    peer = f"rank {ranks[message.peer]}" if message.peer >= 0 else "any rank"
    return f"{message.description}, {'to' if message.is_send else 'from'} {peer}"


def what_keeps_it(waited_s: float) -> str:
    """Return in a few words what the main thread does, and on a second line where it is.

    In a backward pass a third line says which gradient comes next. Returns "" if it is in a
    collective: it has come meanwhile.

    Args:
        waited_s: the seconds for which this thread waited for the interpreter's lock. The main
            thread gives it up at once when it enters an operation of torch, or sleeps; else after
            5 ms (``sys.setswitchinterval``).
    """
    frames = main_thread_stack(whole=True)
    if not frames:
        return ""
    innermost = frames[0]
    where = _place(innermost)
    if any(_DATA.search(str(frame["filename"])) for frame in frames):
        return f"waiting for data\n{where}"
    before = _before(frames)
    if is_ours(str(innermost["filename"])) or _COLLECTIVE.search(str(innermost["filename"])):
        return ""
    before_ns = _main_thread_cpu_ns()
    time.sleep(_GLANCE_S)  # the main thread may have the interpreter's lock again
    state = _main_thread_state()
    if before_ns is None:
        is_on_core = state == "R"
    else:
        is_on_core = (_main_thread_cpu_ns() or before_ns) - before_ns > _GLANCE_S * 1e9 / 10
    if is_on_core:
        doing = "in Python" if waited_s >= sys.getswitchinterval() / 2 else "computing"
    elif innermost["name"] == _BACKWARD:  # threads of devices compute, or it waits for others
        if any(not record.finished_ns for each in recorded_sets() for record in each.records):
            return ""
        doing = "computing"
    else:
        doing = _STATES.get(state, "waiting for a core")
    return f"{doing}\n{where}\n{before}"


def _before(frames: Sequence[dict[str, Any]]) -> str:
    """Return to what the backward pass of the main thread has not come; "" outside of passes."""
    world = current.find_world()
    if world is None or all(frame["name"] != _BACKWARD for frame in frames):
        return ""
    told = [each.pass_progress() for each in world.process_sets.records if each.pass_progress]
    return next(filter(None, told), "")


_GLANCE_S = 0.002
# Of torch.utils.data and torch_ring.data. What a dataset does is called from there.
_DATA = re.compile(r"/torch/utils/data/|/torch_ring/data/")
_COLLECTIVE = re.compile(r"/torch/distributed/")
_BACKWARD = "_engine_run_backward"  # of torch/autograd/graph.py
# Of a thread, in /proc.
_STATES = {"S": "asleep", "D": "waiting for a disk or a file system", "T": "stopped"}


def _main_thread_cpu_ns() -> int | None:
    """Return the time that the main thread has had on cores; None: the system does not say."""
    try:
        return int(Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _main_thread_state() -> str:
    """Return the letter of the main thread's state, whose id is the process's."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


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
