# SPDX-License-Identifier: Apache-2.0
"""HostSlots, parse_hosts, read_hostfile, ...: reads the users' lists of hosts and slots."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ring.errors import InvalidArgumentError, RingError, first_line
from torch_ring.setup.launchers import expand_hostlist

__all__ = [
    "Discovery",
    "HostSlots",
    "RankSlot",
    "assign",
    "cluster_hosts",
    "expand_tasks",
    "find_hosts",
    "is_this_host",
    "parse_hosts",
    "read_hostfile",
]

_NAME = re.compile(r"(?:[\w.-]+@)?[\w.:%-]+")
_EXAMPLE = "write host1:4,host2:4"
_IN_A_FILE = "give a file with lines such as `host1 slots=4`"


@dataclass(frozen=True)
class HostSlots:
    """A host, by its name for ssh, and the number of ranks that it takes."""

    name: str
    slots: int


def parse_hosts(text: str, separator: str = ",", slots: int = 1) -> list[HostSlots]:
    """Return the hosts of "host1:4,host2:4", or of lines that a script prints.

    An IPv6 address stands in brackets, as in "[fd00::1]:4". The slots of a host that is named twice
    are added.

    Args:
        text: the hosts.
        separator: "," or a line end; then there may be no host, and empty lines.
        slots: the slots of a host without a number.

    Raises:
        InvalidArgumentError: the text has another format.
    """
    found = []
    for item in text.split(separator):
        if separator == "\n" and not item.strip():
            continue
        where = f"-H {text!r}: {item!r}" if separator == "," else f"{item!r}"
        match = re.fullmatch(r"\s*(\[[^\]]+\]|[^:\s]+)(?::(\d+))?\s*", item)
        if match is None:
            raise InvalidArgumentError(f"{where} is not a host and slots: {_EXAMPLE}")
        found.append(_host(match[1].strip("[]"), match[2] or str(slots), where))
    return _merged(found)


def read_hostfile(path: str) -> list[HostSlots]:
    """Return the hosts of a file with a line "host slots=4" or "host:4" for each.

    A line may also have a name alone, which counts as one slot each time. A "#" begins a comment;
    other words on a line are Open MPI's, and are ignored.

    Raises:
        InvalidArgumentError: there is no such file, or a line has another format, or it has no
            host.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"the host file {path!r} cannot be read: {error}: {_IN_A_FILE}"
        ) from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"line {number} of the host file {path!r}"
        slots = next((word[6:] for word in words[1:] if word.startswith("slots=")), None)
        name, _, after_colon = words[0].partition(":")
        if words[0].count(":") > 1:  # an IPv6 address
            name, after_colon = words[0].strip("[]"), ""
        found.append(_host(name, slots or after_colon or "1", where))
    if not found:
        raise InvalidArgumentError(f"the host file {path!r} names no host: {_IN_A_FILE}")
    return _merged(found)


def is_this_host(name: str) -> bool:
    """Return whether a name means this process's own host.

    A name that cannot be resolved means another host: ssh may know it.
    """
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            # Only an address of this host can be bound.
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def _host(name: str, slots: str, where: str) -> HostSlots:
    if not _NAME.fullmatch(name) or name.startswith("-"):  # "-o..." would be an option of ssh
        raise InvalidArgumentError(f"{where}: {name!r} is not the name of a host: {_EXAMPLE}")
    if not slots.isdecimal() or int(slots) < 1:
        raise InvalidArgumentError(f"{where}: {slots!r} slots: must be a whole number, 1 or more")
    return HostSlots(name, int(slots))


def _merged(hosts: Iterable[HostSlots]) -> list[HostSlots]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [HostSlots(name, count) for name, count in slots.items()]


@dataclass(frozen=True)
class RankSlot:
    """The place of a rank.

    Attributes:
        host: the name of its host.
        rank, size: rank and size in the world.
        local_rank, local_size: the same among the ranks of the host.
        cross_rank, cross_size: the same among the ranks with this local rank.
        node, nodes: the index of the host among the hosts with ranks, and their number.
    """

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    node: int
    nodes: int


def assign(hosts: Sequence[HostSlots], size: int) -> list[RankSlot]:
    """Return the slots of all ranks, by rank: hosts are filled one after the other.

    Args:
        hosts: the hosts, in the order of their ranks.
        size: the number of ranks; the remaining hosts get none.

    Raises:
        InvalidArgumentError: there are too few slots, or no rank.
    """
    if size < 1:
        raise InvalidArgumentError(f"-np {size}: must be 1 or more")
    there = sum(host.slots for host in hosts)
    if size > there:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise InvalidArgumentError(
            f"-np {size}: there are only {there} slots ({listed}): give fewer ranks, or hosts and "
            "slots with -H"
        )
    taken: list[tuple[str, int]] = []
    left = size
    for host in hosts:
        if left:
            taken.append((host.name, min(left, host.slots)))
            left -= taken[-1][1]
    slots: list[RankSlot] = []
    for node, (name, local_size) in enumerate(taken):
        for local_rank in range(local_size):
            peers = [other for other, (_, count) in enumerate(taken) if count > local_rank]
            slots.append(
                RankSlot(
                    name,
                    len(slots),
                    size,
                    local_rank,
                    local_size,
                    peers.index(node),
                    len(peers),
                    node,
                    len(taken),
                )
            )
    return slots


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
_MOST_NODES = 1 << 20


def cluster_hosts(environment: Mapping[str, str]) -> tuple[list[HostSlots], str] | None:
    """Return the hosts and slots of a cluster's job, and their variable; None: there is no job.

    Raises:
        InvalidArgumentError: the variable does not name hosts.
    """
    # Slurm sets them in jobs only. `environment` lacks SLURM_JOB_ID, a variable of launchers.
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if nodes:
        names = expand_hostlist(nodes)
        tasks = expand_tasks(environment.get("SLURM_TASKS_PER_NODE", "1"), len(names))
        return [HostSlots(*each) for each in zip(names, tasks, strict=True)], "SLURM_JOB_NODELIST"
    for variable in _HOSTFILES:
        if environment.get(variable):
            return read_hostfile(environment[variable]), variable
    return None


def expand_tasks(text: str, nodes: int) -> list[int]:
    """Return the number of tasks of each node: 4, 4 and 3 of Slurm's "4(x2),3".

    Raises:
        InvalidArgumentError: the text has another format, or does not fit the number of nodes.
    """
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", item)
        if match is None or int(match[2] or 1) > _MOST_NODES:
            raise _not_tasks(text, nodes)
        tasks += [int(match[1])] * int(match[2] or 1)
    if len(tasks) == 1:
        tasks *= nodes
    if len(tasks) != nodes or min(tasks) < 1:
        raise _not_tasks(text, nodes)
    return tasks


def _not_tasks(text: str, nodes: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"SLURM_TASKS_PER_NODE={text!r} does not say how many tasks each of the {nodes} nodes has: "
        "give hosts and slots with -H"
    )


_EVERY_S = 1.0
_ANSWER_S = 30.0  # a script that asks a cloud's service may need some


def find_hosts(script: str, slots: int, environment: Mapping[str, str]) -> list[HostSlots]:
    """Return the hosts that a script prints. Blocks until it ends, for 30 s at most.

    Args:
        script: a command for the shell.
        slots: the slots of a host for which the script gives no number.
        environment: the environment of the script.

    Raises:
        RingError: the script has failed, or has been ended after the timeout.
        InvalidArgumentError: it prints a line of another format.
    """
    process = subprocess.Popen(
        ["sh", "-c", script],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise RingError(
            f"{script!r} did not end within {_ANSWER_S:g} s: let it print the hosts of now"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # with the processes it has left behind
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
    if process.returncode:
        why = f": {errors.strip()}" if errors.strip() else ""
        raise RingError(f"{script!r} failed with exit code {process.returncode}{why}")
    try:
        return parse_hosts(said, "\n", slots)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{script!r} has printed {error}") from None


class Discovery:
    """Runs a script every second, in a thread, and keeps its last answer.

    Thread: any. Blocking: the constructor, which runs the script.

    Args:
        find: runs the script; see `find_hosts`.

    Raises:
        RingError, InvalidArgumentError: the script fails at once.
    """

    def __init__(self, find: Callable[[], list[HostSlots]]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._hosts: Sequence[HostSlots] = find()
        self._problem = ""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="torch_ring hosts", daemon=True)

    @property
    def hosts(self) -> Sequence[HostSlots]:
        """The hosts of the last answer."""
        with self._lock:
            return self._hosts

    @property
    def problem(self) -> str:
        """The reason of the script's last failure; empty: its last run did not fail."""
        with self._lock:
            return self._problem

    def start(self) -> None:
        """Run the script every second from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop running the script."""
        self._is_closed.set()

    def _ask(self) -> None:
        while not self._is_closed.wait(_EVERY_S):
            hosts, problem = self.hosts, ""
            try:
                hosts = self._find()
            except (RingError, InvalidArgumentError, OSError) as error:
                problem = first_line(error)
            with self._lock:
                self._hosts, self._problem = hosts, problem
