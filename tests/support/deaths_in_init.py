# SPDX-License-Identifier: Apache-2.0
"""Places in init() where a test kills a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch_ring.membership import first_world
from torch_ring.setup import connect
from torch_ring.world import current, join

__all__ = ["PLACES", "let_die"]

_Place = tuple[Any, str, str, int]
"""Owner and name of a function, whether before or after a call, and the number of the call."""

PLACES: dict[str, _Place] = {
    "before": (current, "init", "before", 1),
    "asking": (first_world, "_ask", "before", 1),
    "placed": (first_world, "_ask", "after", 1),
    "arriving": (join, "meet_on_host", "before", 1),
    "arrived": (join, "exchange_hosts", "before", 1),
    "told": (join, "exchange_hosts", "after", 1),
    "memory": (connect, "_share_memory", "after", 1),
    "connecting": (connect, "_wait_for_neighbours", "before", 1),
    "connected": (connect, "_wait_for_neighbours", "after", 1),
    "engine": (join, "_world_of", "after", 1),
    "engines": (join, "wait_for_all", "after", 1),
}


def let_die(place: str) -> None:
    """Kill this process at a place in the next init()."""
    owner, name, when, nth = PLACES[place]
    function: Callable[..., Any] = getattr(owner, name)
    counts = {"before": 0, "after": 0}  # calls that begin, and calls that do not raise

    def reached(moment: str) -> None:
        counts[moment] += 1
        if moment == when and counts[moment] == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def call(*args: Any, **kwargs: Any) -> Any:
        reached("before")
        result = function(*args, **kwargs)
        reached("after")
        return result

    mock.patch.object(owner, name, call).start()
