# SPDX-License-Identifier: Apache-2.0
"""Rank 0 exits while a daemon thread is in init(), and rank 1 does not connect; for test_exits.py.

Prints the number of threads of rank 0's control plane, and of those that outlive exit functions.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def print_threads() -> None:
    print(len(of_plane), len(of_plane & threads()), flush=True)


of_plane: set[str] = set()
atexit.register(print_threads)  # runs after those of torch_ring

import torch_ring as hvd  # noqa: E402
from torch_ring.setup import connect  # noqa: E402

real = connect.ControlPlane
connects = threading.Event()


def connect_rank_0(rank: int, *more: Any) -> Any:
    if rank == 1:
        threading.Event().wait()
    others = threads()
    plane = real(rank, *more)
    of_plane.update(threads() - others)
    connects.set()
    return plane


connect.ControlPlane = connect_rank_0  # type: ignore[misc, assignment]
threading.Thread(target=hvd.init, daemon=True).start()
connects.wait()
