"""cluster_hosts: the hosts of the job of a resource manager in which this process runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.hosts import Host, read_hostfile

__all__ = ["cluster_hosts", "expand_hostlist", "expand_tasks"]

# Variables with the path of a host file: Kubernetes' MPIJob (of Open MPI, MPICH, Intel MPI), PBS,
# LSF.
_HOSTFILES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
    "PBS_NODEFILE",
    "LSB_DJOB_HOSTFILE",
)
_MOST_HOSTS = 1 << 20  # that a host list may stand for


def cluster_hosts(environment: Mapping[str, str]) -> tuple[list[Host], str] | None:
    """Return the hosts and slots of a job, and the variable that has them; None: there is no job.

    Raises:
        InvalidArgumentError: the variable does not name hosts.
    """
    # Slurm sets them in jobs only. SLURM_JOB_ID is no part of the environment without launchers.
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if nodes:
        names = expand_hostlist(nodes)
        tasks = expand_tasks(environment.get("SLURM_TASKS_PER_NODE", "1"), len(names))
        return [Host(*each) for each in zip(names, tasks, strict=True)], "SLURM_JOB_NODELIST"
    for variable in _HOSTFILES:
        if environment.get(variable):
            return read_hostfile(environment[variable]), variable
    return None


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of Slurm's list: gpu01, gpu02 and login of "gpu[01-02],login".

    Raises:
        InvalidArgumentError: it is no such list.
    """
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|.", text.strip()):
        if item == ",":
            continue
        parts = re.findall(r"\[([^\[\]]+)\]|([^\[\]]+)", item)
        if "".join(f"[{ranges}]" if ranges else word for ranges, word in parts) != item:
            raise _not_a_list(text)
        choices = [_numbers(ranges, text) if ranges else [word] for ranges, word in parts]
        names += map("".join, itertools.product(*choices))
    if not names:
        raise _not_a_list(text)
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    """Return 01, 02, 07 of "01-02,07", with their zeros."""
    found: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise _not_a_list(text)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise _not_a_list(text)
        found += (f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1))
    return found


def expand_tasks(text: str, nodes: int) -> list[int]:
    """Return the number of tasks of each node: 4, 4 and 3 of Slurm's "4(x2),3".

    Raises:
        InvalidArgumentError: it says nothing for so many nodes.
    """
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", item)
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            raise _not_tasks(text, nodes)
        tasks += [int(match[1])] * int(match[2] or 1)
    if len(tasks) == 1:
        tasks *= nodes
    if len(tasks) != nodes or min(tasks) < 1:
        raise _not_tasks(text, nodes)
    return tasks


def _not_a_list(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"SLURM_JOB_NODELIST={text!r} is not a list of hosts: give them with -H"
    )


def _not_tasks(text: str, nodes: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"SLURM_TASKS_PER_NODE={text!r} does not say how many tasks each of the {nodes} nodes has: "
        "give hosts and slots with -H"
    )
