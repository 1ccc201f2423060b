"""Inquiries: what the ranks of a world ask one another, over their control connections."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from torch_ring._C import ControlPlane

__all__ = ["Inquiries", "answer_with"]

_log = logging.getLogger("torch_ring")


def _nothing() -> str:
    return ""


_answer: Callable[[], str] = _nothing


def answer_with(answer: Callable[[], str]) -> None:
    """Set what tells other ranks what this process does. Another thread calls it than the trainer.

    Args:
        answer: tells what it does, in 4096 bytes of UTF-8 at most.
    """
    global _answer
    _answer = answer


class Inquiries:
    """Answers the questions of other ranks, and asks them. Logs an answer that nobody awaits.

    The engine asks the ranks for which it has waited long. Another thread answers than the one that
    trains, which may be the one that is asked about; it lives while there is something to answer.

    Args:
        plane: of this process. When it stops, nothing is answered any more.
        labels: the name of each rank in messages.
    """

    def __init__(self, plane: ControlPlane, labels: Sequence[str]) -> None:
        self._plane, self._labels = plane, labels
        self._changed = threading.Condition()
        self._awaited: dict[int, str | None] = {}  # by number of the question
        plane.read_letters(self._read)

    def ask(self, ranks: Sequence[int], timeout_s: float) -> dict[int, str]:
        """Return what ranks do, of those that answer within `timeout_s` seconds."""
        numbers = {rank: self._ask(rank) for rank in ranks}
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(
                lambda: all(self._awaited[number] is not None for number in numbers.values()),
                max(0.0, deadline - time.monotonic()),
            )
            answers = {rank: self._awaited.pop(number) for rank, number in numbers.items()}
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def _ask(self, rank: int) -> int:
        with self._changed:  # before the answer comes
            number = self._plane.ask(rank)
            self._awaited[number] = None
            return number

    def _read(self, is_question: bool, rank: int, number: int, text: str) -> None:
        if is_question:
            self._plane.answer(rank, number, _told(_answer))
            return
        with self._changed:
            if number in self._awaited:
                self._awaited[number] = text
                self._changed.notify_all()
                return
        if text:
            _log.warning("%s: %s", self._labels[rank], text)


def _told(answer: Callable[[], str]) -> str:
    try:
        text = answer()
    except Exception as error:  # of no importance but to the one who asks
        text = f"cannot tell what it does: {error}"
    return text.encode(errors="replace").decode()  # a path may be no UTF-8
