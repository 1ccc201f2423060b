# SPDX-License-Identifier: Apache-2.0
"""usable_cpus, shared_cpus, cpu_quota: a process's CPUs under a container's or a job's groups.

The text of this file is sent to every host: it uses only the standard library.
"""

from __future__ import annotations

import math
import os

__all__ = ["allowed_cpus", "cpu_quota", "shared_cpus", "usable_cpus"]

_ROOT = "/sys/fs/cgroup"


def usable_cpus() -> float:
    """Return the number of CPUs on which this process may run, or its quota if that is less."""
    return min(allowed_cpus(), cpu_quota())


def allowed_cpus() -> int:
    """Return the number of CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS, Windows


def shared_cpus(sharers: int, local_size: int) -> tuple[float, int]:
    """Return the CPUs of which this rank's share is least, and the number of ranks that share them.

    Args:
        sharers: the ranks that share the CPUs on which this process may run.
        local_size: the ranks that share its quota.
    """
    limits = ((float(allowed_cpus()), sharers), (cpu_quota(), local_size))
    return min(limits, key=lambda limit: limit[0] / limit[1])


def cpu_quota() -> float:
    """Return the smallest quota, in CPUs, of this process's control groups; infinity: none.

    A group is limited by its parent groups, too. In version 2 "200000 100000" means two CPUs; in
    version 1 the two numbers are in two files, and -1 is no limit.
    """
    pairs = [text.split() for text in _limits("cpu.max", "")]
    quotas = _limits("", "cpu.cfs_quota_us")
    periods = _limits("", "cpu.cfs_period_us")
    pairs += [list(pair) for pair in zip(quotas, periods, strict=False)]
    whole = [[int(each) for each in pair] for pair in pairs if all(map(str.isdecimal, pair))]
    return min(
        (pair[0] / pair[1] for pair in whole if len(pair) == 2 and all(pair)), default=math.inf
    )


def _limits(name: str, old_name: str) -> list[str]:
    """Return the first lines of a file in this process's control groups, up to the root.

    A container may see its group's path on the host, while its root is that group itself.

    Args:
        name: the file's name in version 2; empty: none.
        old_name: the file's name in version 1.
    """
    files = {f"{_ROOT}/{name}": name, f"{_ROOT}/cpu/{old_name}": old_name}
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        is_old = "cpu" in controllers.split(",")
        if controllers and not is_old:
            continue
        root, file = (f"{_ROOT}/cpu", old_name) if is_old else (_ROOT, name)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            files["/".join([root, *parts[:depth], file])] = file
    return [text[0] for path, file in files.items() if file and (text := _lines(path))]


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except (OSError, ValueError):  # missing, or not readable
        return []
