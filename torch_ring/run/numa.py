# SPDX-License-Identifier: Apache-2.0
"""cpus_of, bind: the CPUs of a rank on a host with several NUMA nodes, for ``--numa-binding``.

The modes are torchrun's. Its own code (torch.numa) follows the GPU of a rank, and needs torch and
numactl where the rank starts. Here ranks are dealt to the nodes in turn, with or without GPUs.

The text of this file is sent to every host: it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MODES", "BindingError", "bind", "cpus_of"]

MODES = ("node", "socket", "exclusive", "core-complex")

_SYSTEM = "/sys/devices/system"


class BindingError(Exception):
    """A rank cannot be bound to CPUs."""


def cpus_of(
    mode: str, local_rank: int, local_size: int, allowed: set[int], system: str = _SYSTEM
) -> set[int]:
    """Return the CPUs of a rank: of NUMA node `local_rank` modulo the number of nodes.

    Args:
        mode: "node": all CPUs of the node; "socket": all of the node's socket; "exclusive": an
            equal share of the node's cores for this rank alone; "core-complex": the CPUs that share
            one last-level cache; the ranks of a node take such groups in turn.
        local_rank: the rank's index on this host.
        local_size: the number of ranks on this host.
        allowed: the CPUs on which this process may run. Nodes without any of them do not count.
        system: the folder in which the kernel describes CPUs and nodes.

    Raises:
        BindingError: the kernel does not describe them, or there are too few cores.
    """
    try:
        nodes = _nodes(allowed, system)
        if not nodes:
            raise BindingError(f"none of the NUMA nodes in {system}/node has a CPU for this job")
        node = nodes[local_rank % len(nodes)]
        turn = local_rank // len(nodes)  # among the ranks of this node
        turns = len(range(local_rank % len(nodes), local_size, len(nodes)))
        if mode == "socket":
            socket = _socket_of(min(node), system)
            return set().union(*(each for each in nodes if _socket_of(min(each), system) == socket))
        if mode == "exclusive":
            cores = _groups(node, lambda cpu: _siblings_of(cpu, system))
            if len(cores) < turns:
                raise BindingError(
                    f"{turns} ranks share a NUMA node with {len(cores)} cores, and each needs one "
                    "of its own"
                )
            mine = cores[len(cores) * turn // turns : len(cores) * (turn + 1) // turns]
            return set().union(*mine)
        if mode == "core-complex":
            complexes = _groups(node, lambda cpu: _sharers_of_last_cache(cpu, system))
            return complexes[turn % len(complexes)]
        return node
    except (OSError, ValueError) as error:
        raise BindingError(
            f"the kernel of this host does not describe its NUMA nodes: {error}"
        ) from None


def bind(pid: int, cpus: set[int]) -> None:
    """Bind all threads of a process. Raises OSError: none of the CPUs may be used.

    Args:
        pid: the id of the process.
        cpus: the CPUs on which it may run from now on.
    """
    os.sched_setaffinity(pid, cpus)
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cpus)


def _nodes(allowed: set[int], system: str) -> list[set[int]]:
    """Return the allowed CPUs of each node, without empty nodes."""
    names = [name for name in os.listdir(f"{system}/node") if name[4:].isdecimal()]
    numbers = sorted(int(name[4:]) for name in names if name.startswith("node"))
    found = [_read_cpus(f"{system}/node/node{number}/cpulist") & allowed for number in numbers]
    return [cpus for cpus in found if cpus]


def _socket_of(cpu: int, system: str) -> str:
    return _read(f"{system}/cpu/cpu{cpu}/topology/physical_package_id")


def _siblings_of(cpu: int, system: str) -> set[int]:
    return _read_cpus(f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list")


def _sharers_of_last_cache(cpu: int, system: str) -> set[int]:
    folder = f"{system}/cpu/cpu{cpu}/cache"
    caches = [f"{folder}/{name}" for name in os.listdir(folder) if name.startswith("index")]
    if not caches:
        raise ValueError(f"{folder} is empty")
    last = max(caches, key=lambda cache: int(_read(f"{cache}/level")))
    return _read_cpus(f"{last}/shared_cpu_list")


def _groups(cpus: set[int], group_of: Callable[[int], set[int]]) -> list[set[int]]:
    """Return the groups of CPUs, the largest first, then by number."""
    left, groups = set(cpus), []
    while left:
        group = group_of(min(left)) & left or {min(left)}
        groups.append(group)
        left -= group
    return sorted(groups, key=lambda group: (-len(group), min(group)))


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def _read_cpus(path: str) -> set[int]:
    """Return the CPUs in a list such as "0-3,8"; raises OSError or ValueError."""
    cpus: set[int] = set()
    for part in filter(None, _read(path).split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
