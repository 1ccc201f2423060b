# SPDX-License-Identifier: Apache-2.0
"""ancestors, is_stopped: processes of this host, as Linux shows them in /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ancestors", "is_stopped", "stat_of"]


def ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on, as far as they can be seen."""
    with contextlib.suppress(OSError):  # they end meanwhile; no /proc, or it hides other users'
        while (pid := int(stat_of(pid)[1])) > 0:
            yield pid


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger; False if it is unseen."""
    with contextlib.suppress(OSError):
        return stat_of(pid)[0] in "Tt"
    return False


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
