"""Standbys: processes that have imported torch, and wait to take the place of a rank."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.standby_process import READ_PROGRAM

__all__ = ["Standbys", "standby_command"]

_PYTHON = re.compile(r"python[\d.]*|pypy[\d.]*")
_FLAGS = re.compile(r"-[bBdEhiIOPqsSuvx]+")  # of python, without a value
_VALUED = re.compile(r"-[WX](.*)")
_FIRST = -2  # the number of the first one: numbers below 0 are no ranks, and -1 is the launcher
_MOST_FAILURES = 3  # in a row


def standby_command(command: Sequence[str]) -> list[str]:
    """Return the command of a process that waits, and then does what a command does.

    Raises:
        InvalidArgumentError: the command does not begin with python and its program.
    """
    if _PYTHON.fullmatch(os.path.basename(command[0])) is None:
        raise InvalidArgumentError(
            f"--standby needs a command that begins with python, and not with {command[0]!r}"
        )
    index = 1
    while index < len(command):
        valued = _VALUED.fullmatch(command[index])
        if valued is None and _FLAGS.fullmatch(command[index]) is None:
            break
        index += 2 if valued is not None and not valued[1] else 1
    program = list(command[index:])
    if not program or (program[0].startswith("-") and program[0] not in ("-m", "-c")):
        raise InvalidArgumentError(
            "--standby needs a command such as `python train.py` or `python -m train`"
        )
    return [*command[:index], "-c", READ_PROGRAM, *program]


class Standbys:
    """How many such processes there are, and where: on the hosts that have the fewest.

    Args:
        count: how many there are to be.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._host_of: dict[int, str] = {}
        self._next = _FIRST
        self._failures = 0  # in a row

    def wanted(self, hosts: Sequence[str]) -> list[tuple[int, str]]:
        """Return the numbers and hosts of those that are to be started now, which then count."""
        found = []
        while hosts and len(self._host_of) < self._count and not self.has_given_up:
            counts = Counter(self._host_of.values())
            host = min(hosts, key=lambda each: counts[each])
            found.append((self._next, host))
            self._host_of[self._next] = host
            self._next -= 1
        return found

    def take(self, host: str) -> int | None:
        """Return the number of one on a host, which counts no more; None: there is none."""
        for number, its_host in self._host_of.items():
            if its_host == host:
                del self._host_of[number]
                self._failures = 0
                return number
        return None

    def end(self, number: int) -> bool:
        """Note that one has ended while it waited; return whether no more are started now."""
        if self._host_of.pop(number, None) is None:
            return False
        self._failures += 1
        return self._failures == _MOST_FAILURES

    def lose(self, host: str) -> None:
        """Note that a host was lost."""
        for number in [n for n, its_host in self._host_of.items() if its_host == host]:
            del self._host_of[number]

    @property
    def has_given_up(self) -> bool:
        """Whether so many have failed, one after the other, that no more are started."""
        return self._failures >= _MOST_FAILURES
