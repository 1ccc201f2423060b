"""close_in_child: what a child lets go of that another thread forks in the middle of init().

As long as a child holds the connections of its parent, no other rank notices the parent's death;
as long as it holds a listener, others connect and wait for an answer.
"""

from __future__ import annotations

import contextlib
from typing import Protocol, TypeVar
from weakref import WeakSet

__all__ = ["close_all_in_child", "close_in_child"]


class Closable(Protocol):
    def close(self) -> None:
        """Close the descriptor. Does nothing the second time."""


Made = TypeVar("Made", bound=Closable)

_made: WeakSet[Closable] = WeakSet()


def close_in_child(made: Made) -> Made:
    """Return `made`, a socket or a file. A forked child closes its copy if it lives by then."""
    _made.add(made)
    return made


def close_all_in_child() -> None:
    """Close what the parent had open. Call in a forked child."""
    for made in list(_made):
        with contextlib.suppress(OSError):
            made.close()
    _made.clear()
