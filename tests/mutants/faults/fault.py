# SPDX-License-Identifier: Apache-2.0
"""Fault, Room: what could go wrong silently, and where."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Fault", "Room"]


class Fault(NamedTuple):
    """A fault at one place.

    Attributes:
        name: its name.
        says: the fault in words.
        file: the source file.
        old: the text that it replaces, which is there once: statements, or an expression.
        new: the text in its place; "": C++ does without.
        tests: tests that know the place best, which run first: paths in tests/; of tests/cpp, as
            "cpp:word", those with a word in their names.
    """

    name: str
    says: str
    file: str
    old: str
    new: str = ""
    tests: tuple[str, ...] = ()

    @property
    def is_expression(self) -> bool:
        """Whether the texts, of C++, are expressions; statements end with a semicolon."""
        return not self.old.rstrip().endswith(";")


class Room(NamedTuple):
    """A part of the source.

    Attributes:
        faults: its faults.
        tests: the paths of its tests, of which the slow ones are left out.
        slow_tests: the paths of slow tests, which run last.
    """

    faults: tuple[Fault, ...]
    tests: tuple[str, ...]
    slow_tests: tuple[str, ...] = ()
