"""Gathering: the processes with which an elastic job begins, until all that live have asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Gathering"]


@dataclass(frozen=True)
class _Asker:
    """A process that wants a place: its question, which no other one is, and where it listens."""

    question: str
    host: str
    port: int


class Gathering:
    """Gives each process a place in a world of those that live, when all of them have asked.

    The launcher has it, and knows who lives. A process whose world was not made, because another
    one has died meanwhile, asks once more.

    Thread: any. Blocking: no.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: Mapping[str, int] = {}
        self._askers: dict[str, _Asker] = {}
        self._answers: dict[str, tuple[str, dict[str, Any]]] = {}  # by process: to which question

    def expect(self, processes: Mapping[str, int]) -> None:
        """Note which processes live.

        Args:
            processes: by name, in the order of their ranks, which the launcher has given them.
        """
        with self._lock:
            self._expected = dict(processes)
            self._answer()

    def ask(self, process: str, question: str, host: str, port: int) -> dict[str, Any]:
        """Return the place of a process, or for which ranks it waits: then it is to ask again.

        Args:
            process: its name.
            question: the same as long as it asks for the same world.
            host: where it can serve a store for the others.
            port: the same.

        Returns:
            ``{"kind": "place", "processes": names by rank, "store": [host, port]}``, with the
            address that rank 0 has given; ``{"kind": "void", "gone": ranks}`` if some of them have
            ended since then; or ``{"kind": "wait", "here": ranks, "missing": ranks}``, of those
            that live.
        """
        with self._lock:
            answered, answer = self._answers.get(process, ("", {}))
            if answered != question:
                self._askers[process] = _Asker(question, host, port)
                self._answer()
                answered, answer = self._answers.get(process, ("", {}))
            if answered == question:
                processes = enumerate(answer["processes"])
                gone = [rank for rank, each in processes if each not in self._expected]
                return {"kind": "void", "gone": gone} if gone else answer
            here = [rank for each, rank in self._expected.items() if each in self._askers]
            missing = set(self._expected.values()).difference(here)
            return {"kind": "wait", "here": sorted(here), "missing": sorted(missing)}

    def _answer(self) -> None:
        """Answer all that live, if all of them have asked."""
        living = self._expected
        if not living or not living.keys() <= self._askers.keys():
            return
        askers = [self._askers.pop(process) for process in living]
        answer = {
            "kind": "place",
            "processes": list(living),
            "store": [askers[0].host, askers[0].port],
        }
        for process, asker in zip(living, askers, strict=True):
            self._answers[process] = asker.question, answer
