"""Facts of the machine: processor, memory, limits of the container and of this process."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
from pathlib import Path
from typing import Any

from torch_ring.rendezvous.control_groups import cpu_quota, limits_of_groups

__all__ = ["limits", "machine"]

_OF_PROCESS = 64  # descriptors that a process has besides those to its ranks: a guess with room
_CONTROL = 64  # control connections of a rank, at most: 2 log2 of the ranks (csrc/control/graph.h)
_NO_LIMIT = 1 << 60  # bytes: what version 1 of the control groups says instead of "max"

Facts = dict[str, Any]


def machine() -> Facts:
    """Return processor, memory and what the container leaves of them. None: not known, no limit."""
    memory = _key_values("/proc/meminfo")
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    processor = _key_values("/proc/cpuinfo")
    flags = processor.get("flags", "").split()
    return {
        "system": platform.platform(terse=True),
        "kernel": platform.release(),
        "glibc": platform.libc_ver()[1],
        "cpu": processor.get("model name", platform.machine()),
        "vector_instructions": _vector_instructions(flags),
        "cpus": os.cpu_count(),
        "cpus_allowed": sorted(os.sched_getaffinity(0)),
        "cpus_of_container": None if cpu_quota() == math.inf else cpu_quota(),
        "load": _load(),
        "memory_bytes": _kilobytes(memory.get("MemTotal")),
        "memory_available_bytes": _kilobytes(memory.get("MemAvailable")),
        "memory_of_container_bytes": _memory_limit(),
        "dev_shm_bytes": shm.total if shm else None,
        "dev_shm_free_bytes": shm.free if shm else None,
        "huge_pages": _first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
    }


def limits(connections: int) -> Facts:
    """Return the limits of this process; None: unlimited.

    Args:
        connections: TORCH_RING_CONNECTIONS.
    """
    files, most_files = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return {
        "open_files": files,
        # init() raises the limit where it is too low. The leader of a host has a connection with
        # each of its ranks until all have joined.
        "ranks_on_one_host": _connected(most_files, 1),
        # Each rank has data connections with a rank of every other host.
        "hosts_of_an_alltoall": _connected(files, connections),
        "locked_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "address_space_bytes": _limit(resource.RLIMIT_AS),
        "processes": _limit(resource.RLIMIT_NPROC),
    }


def _connected(files: int | None, connections: int) -> int | None:
    """Return how many can have so many connections with one of them, which may open `files`."""
    if files is None:
        return None
    return 1 + max(0, files - _OF_PROCESS - _CONTROL) // connections


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:  # no /proc, which every container should have
        return None


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _vector_instructions(flags: list[str]) -> str:
    """Return which of the compiled loops reduce here, as csrc/core/reduce.cc chooses."""
    if {"avx512bw", "avx512vl", "avx512dq"} <= set(flags):
        return "AVX-512"
    if {"avx2", "f16c"} <= set(flags):
        return "AVX2"
    return "SSE2" if "sse2" in flags else "the compiler's default"


def _memory_limit() -> int | None:
    texts = limits_of_groups("memory", "memory.max", "memory.limit_in_bytes")
    known = [int(text) for text in texts if text.isdecimal() and int(text) < _NO_LIMIT]
    return min(known, default=None)


def _key_values(path: str) -> dict[str, str]:
    """Return "key: value" lines; of a key that comes several times, the first."""
    pairs = [line.partition(":") for line in _lines(Path(path))]
    return {key.strip(): value.strip() for key, _, value in reversed(pairs)}


def _kilobytes(text: str | None) -> int | None:
    return int(text.split()[0]) << 10 if text else None


def _first_line(path: Path) -> str | None:
    return next(iter(_lines(path)), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not there, or not ours to read
        return []
