"""watched_launcher: the process of the launcher that has started this one."""

from __future__ import annotations

import os
from pathlib import Path

from torch_ring.rendezvous.launchers import LAUNCHERS, Identity

__all__ = ["watched_launcher"]

_AGENT = "pt_elastic"  # what torchrun calls its process, since torch 2.5


def watched_launcher(identity: Identity) -> tuple[int, str]:
    """Return a pidfd of this process's parent, if that is a launcher, and a line for its end.

    A shell between the launcher and this process, or a notebook, is no launcher: what these have
    started may outlive them.

    Returns:
        -1 and "" if there is nothing to watch.
    """
    launcher = LAUNCHERS.get(identity.launcher)
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
        if launcher is None or not launcher.daemons or not name.startswith(launcher.daemons):
            return -1, ""
        fd = os.pidfd_open(parent)
    except OSError:  # it has ended, or this kernel has no pidfds
        return -1, ""
    if os.getppid() != parent:  # another process may have its number
        os.close(fd)
        return -1, ""
    if name == _AGENT:
        name = identity.launcher
    return fd, (
        f"[torch_ring] rank {identity.rank} (pid {os.getpid()}) ends: {name} (pid {parent}), which "
        "has started it, has died. TORCH_RING_EXIT_WITH_LAUNCHER=0 lets ranks outlive it"
    )
