"""report: what all ranks that live are doing now, asked by one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_ring._C import MessageRecord
from torch_ring.connections.inquiries import answer_with
from torch_ring.tracing.operations import asked_world, recorded_sets
from torch_ring.tracing.stacks import main_thread_stack

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
    answer_with(what_it_does)


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
