"""usable_cpus, cpu_quota: the CPUs that the control groups of a container or a job leave a process.

The text of this file is sent to every host: it uses the standard library only.
"""

from __future__ import annotations

import math
import os

__all__ = ["cpu_quota", "usable_cpus"]

_ROOT = "/sys/fs/cgroup"


def usable_cpus() -> float:
    """Return the number of CPUs on which this process may run, or of its quota, if that is less."""
    return min(len(os.sched_getaffinity(0)), cpu_quota())


def cpu_quota() -> float:
    """Return the least quota in CPUs of this process's control groups; infinity: there is none.

    A group has what the groups around it leave. In version 2 "200000 100000" are two CPUs, in
    version 1 the two numbers stand in two files, and -1 is no limit.
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
    """Return a file's first line in the control groups of this process, from its own to the root's.

    In a container that sees the path of its group on the host, the root is its own group.

    Args:
        name: the file's name in version 2; empty: none.
        old_name: in version 1.
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
    except (OSError, ValueError):  # not there, or not ours to read
        return []
