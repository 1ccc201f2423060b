# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: the tested code keeps no state in globals."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

DEADLINE_S = 60.0  # limits a hang, not a slow machine


def run_on_ranks(size: int, fn: Callable[[int], Any]) -> list[Any]:
    """Call ``fn(rank)`` on all ranks; return its results or the exceptions that it raised."""

    def guarded(rank: int) -> Any:
        try:
            return fn(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(guarded, range(size), timeout=DEADLINE_S))
