# SPDX-License-Identifier: Apache-2.0
"""Identity, discover: rank and size of this process, from the variables of its launcher."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch_ring.errors import InvalidArgumentError

__all__ = [
    "LAUNCHERS",
    "Identity",
    "Launcher",
    "discover",
    "environment_for_now",
    "expand_hostlist",
    "is_of_inner_job",
    "process_name",
    "slurm_job",
    "tasks_of_node",
    "variables_of_launchers",
    "watched_launcher",
    "why_not_alone",
    "without_launchers",
]


@dataclass(frozen=True)
class Identity:
    """Rank, size and node of this process, and the launcher that set them.

    Attributes:
        rank, size: 0-based index of this process; number of processes.
        local_rank, local_size: index and number within its node; None if the launcher does not set
            them.
        node: the launcher's name of this node; None: the host.
        nodes: the number of nodes, if the launcher gives it.
        launcher: a key of `LAUNCHERS`; "python" for a process that no launcher started, "init" if
            rank and size are arguments of init().
        job: the launcher's name of this start of the job.
        part: the launcher's ranks that this world consists of, ascending; empty if it has all.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    node: str | None = None
    nodes: int | None = None
    launcher: str = "python"
    job: str = ""
    part: tuple[int, ...] = ()

    def among(self, ranks: tuple[int, ...]) -> Identity:
        """Return the identity of this process in a world of some of the ranks.

        The launcher's local rank is not valid there, and is counted again.

        Args:
            ranks: of this identity's world, ascending; this process is one of them.
        """
        return replace(
            self,
            rank=ranks.index(self.rank),
            size=len(ranks),
            local_rank=None,
            local_size=None,
            nodes=1 if self.on_one_node() else None,
            part=ranks,
        )

    def launched_rank(self) -> int:
        """Return this process's rank in the launcher's numbering."""
        return self.part[self.rank] if self.part else self.rank

    def source(self) -> str:
        """Return the source of rank and size, as named in errors."""
        names = {"env": "RANK and WORLD_SIZE", "init": "init(rank=, size=)"}
        return names.get(self.launcher, self.launcher)

    def on_one_node(self) -> bool:
        """Return whether the launcher says that all ranks are on one node."""
        return self.local_size == self.size or self.nodes == 1


@dataclass(frozen=True)
class Launcher:
    """Names of the variables in which a launcher numbers its processes.

    Of a tuple of names, the first variable that is set counts.

    Attributes:
        node, nodes: variables of the node's name and of the number of nodes.
        local_sizes: a variable of the number of processes of every node, in Slurm's format.
        job: variables that together name one start of a job.
        requires: a variable that must be set, too: without it the others were only inherited.
        daemons: prefixes of the names of its processes that start ranks.
    """

    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: str | None = None
    node: str | None = None
    nodes: tuple[str, ...] = ()
    local_sizes: str | None = None
    job: tuple[str, ...] = ()
    requires: str | None = None
    daemons: tuple[str, ...] = ()


# In order of precedence, the innermost first: our own launcher's and horovodrun's variables are set
# for this library only; torchrun and mpirun may run inside a Slurm step, and Hydra starts its
# proxies with srun.
LAUNCHERS: dict[str, Launcher] = {
    # torch_ring.run sets horovodrun's variables, too, for programs that read them.
    "torch_ring.run": Launcher(
        "RANK",
        ("WORLD_SIZE",),
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        node="GROUP_RANK",
        nodes=("GROUP_WORLD_SIZE",),
        job=("TORCH_RING_RUN_ID",),
        requires="TORCH_RING_RUN_ID",
        daemons=("python",),
    ),
    "horovodrun": Launcher(
        "HOROVOD_RANK", ("HOROVOD_SIZE",), "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    ),
    "torchrun": Launcher(
        "RANK",
        ("WORLD_SIZE",),
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        node="GROUP_RANK",
        job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"),
        requires="TORCHELASTIC_RUN_ID",
        daemons=("pt_elastic", "torchrun", "python", "accelerate"),
    ),
    "Open MPI": Launcher(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
        daemons=("mpirun", "mpiexec", "orterun", "orted", "prte"),
    ),
    # Not for ranks that srun started through its PMI: srun's own variables tell more.
    "Hydra": Launcher(
        "PMI_RANK",
        ("PMI_SIZE",),
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        requires="MPI_LOCALNRANKS",
        daemons=("hydra_pmi_proxy",),
    ),
    # The shell of salloc and the script of sbatch have the job's variables, but are no tasks of it.
    "srun": Launcher(
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        node="SLURM_NODEID",
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        local_sizes="SLURM_STEP_TASKS_PER_NODE",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        requires="SLURM_STEP_ID",
        daemons=("slurmstepd",),
    ),
    "PMI": Launcher("PMI_RANK", ("PMI_SIZE",), "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    # Set by hand or by Kubernetes' PyTorchJob; must not contradict a launcher above.
    "env": Launcher("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}

_PROCESS = "TORCH_RING_PROCESS"
# Variables of launchers that may run inside a torch_ring.run process; it removes inherited ones.
_STARTED_SINCE = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

# Steps from this number on, such as an interactive shell's, run beside the job's tasks (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_MOST_HOSTS = 1 << 20  # in a host list


def discover(
    environment: Mapping[str, str] = os.environ,
    *,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
) -> Identity:
    """Return the identity of this process; without a launcher it is rank 0 of 1.

    Arguments take precedence over the environment. `LAUNCHERS` is in order of precedence.

    Raises:
        InvalidArgumentError: a launcher's variables, or the arguments, are incomplete or
            contradict one another.
    """
    if (rank is None) != (size is None):
        raise InvalidArgumentError(
            "give init() both rank and size, as in init(rank=0, size=2), or neither"
        )
    if rank is None or size is None:
        identity = _launched(environment)
    else:
        identity = Identity(rank, size, launcher="init")
        with contextlib.suppress(InvalidArgumentError):
            launched = _launched(environment)
            if (rank, size) == (launched.rank, launched.size) and launched.launcher != "python":
                identity = launched  # has the node and the job, too
    if local_rank is not None:
        identity = replace(identity, local_rank=local_rank, node=None)
    if local_size is not None:
        identity = replace(identity, local_size=local_size, node=None)
    _require_below("rank", identity.rank, "size", identity.size)
    if identity.local_rank is not None and identity.local_size is not None:
        _require_below("local_rank", identity.local_rank, "local_size", identity.local_size)
    return identity


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of Slurm's list: gpu01, gpu02 and login of "gpu[01-02],login".

    Raises:
        InvalidArgumentError: the text is no such list.
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


def _not_a_list(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{text!r}, of Slurm, is not a list of hosts: set MASTER_ADDR, or give the launcher its "
        "hosts with -H"
    )


def tasks_of_node(counts: str, node: str) -> int | None:
    """Return a node's number of tasks in Slurm's list for all nodes: 4 in "4(x2),3" for node "1".

    None if the list lacks the node.
    """
    left = int(node) if node.isdecimal() else -1
    for item in counts.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", item)
        if found is None:
            return None
        tasks, nodes = int(found[1]), int(found[2] or 1)
        if 0 <= left < nodes:
            return tasks or None
        left -= nodes
    return None


def process_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return torch_ring.run's name of this process in an elastic job; empty: it has none.

    The name does not apply to ranks of an inner job, which have only inherited the variable.
    """
    return "" if is_of_inner_job(environment) else environment.get(_PROCESS, "")


def is_of_inner_job(
    environment: Mapping[str, str] = os.environ, rank: int | None = None, size: int | None = None
) -> bool:
    """Return whether this is a rank of a job that a process of torch_ring.run has started.

    Then the variables of torch_ring.run are meant for that process, not for this one.

    Args:
        environment: the environment of this process.
        rank: as for init().
        size: as for init().
    """
    if any(name in environment for name in _STARTED_SINCE):
        return True
    for here, own, given in (("RANK", "HOROVOD_RANK", rank), ("WORLD_SIZE", "HOROVOD_SIZE", size)):
        told = environment.get(here, "")
        if given is not None and str(given) != told:
            return True
        if "TORCH_RING_RUN_ID" in environment and told != environment.get(own, told):
            return True  # torch_ring.run sets both to the same value
    return False


def variables_of_launchers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the launchers' variables in the environment: ranks, sizes, the store's address."""
    names = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", _PROCESS}
    for launcher in LAUNCHERS.values():
        names |= {launcher.rank, *launcher.size, launcher.local_rank, *launcher.nodes}
        names |= {*launcher.job}
        more = (launcher.local_size, launcher.local_sizes, launcher.node, launcher.requires)
        names |= {name for name in more if name}
    return {name: environment[name] for name in sorted(names) if name in environment}


def without_launchers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for ranks started by this process, without launchers' variables."""
    theirs = variables_of_launchers(environment)
    return {name: value for name, value in environment.items() if name not in theirs}


@contextlib.contextmanager
def environment_for_now(environment: Mapping[str, str]) -> Iterator[None]:
    """Context in which this process has another environment; its changes there are forgotten."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def slurm_job(environment: Mapping[str, str] = os.environ) -> str:
    """Return the number of the Slurm job in which this process runs; empty: there is none."""
    return environment.get("SLURM_JOB_ID", "")


def _launched(environment: Mapping[str, str]) -> Identity:
    """Return the identity from the first launcher of the table whose variables are complete."""
    identity = None
    halves: list[tuple[str, str]] = []  # (set, not set)
    for name, launcher in LAUNCHERS.items():
        if not _concerns(launcher, environment):
            continue
        size = next((v for v in launcher.size if v in environment), launcher.size[0])
        unset = [v for v in (launcher.rank, size) if v not in environment]
        if not unset:
            identity = identity or _read(name, launcher, size, environment)
        elif len(unset) == 1:
            halves.append((size if unset == [launcher.rank] else launcher.rank, unset[0]))
    if identity is None:
        if halves:
            raise InvalidArgumentError(
                "{} is set and {} is not: set both, or neither".format(*halves[0])
            )
        return Identity()
    is_elastic = environment.get("HOROVOD_ELASTIC", "0") not in ("", "0")
    if identity.launcher == "horovodrun" and is_elastic:
        raise InvalidArgumentError(
            "HOROVOD_ELASTIC is set: the elastic driver of horovodrun has started this process, "
            "and torch_ring does not ask it for ranks. Start the job with `python -m "
            "torch_ring.run`, which takes the same options"
        )
    if identity.launcher != "torchrun":
        _require_no_contradiction(identity, environment)
    return identity


def _concerns(launcher: Launcher, environment: Mapping[str, str]) -> bool:
    if launcher.requires is not None and launcher.requires not in environment:
        return False
    if launcher.requires != "SLURM_STEP_ID":
        return True
    step = environment["SLURM_STEP_ID"]
    return not (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)


def _read(
    name: str, launcher: Launcher, size_variable: str, environment: Mapping[str, str]
) -> Identity:
    def optional(*variables: str | None) -> int | None:
        return next((_whole(v, environment) for v in variables if v and v in environment), None)

    rank, size = _whole(launcher.rank, environment), _whole(size_variable, environment)
    _require_below(launcher.rank, rank, size_variable, size)
    local_rank, local_size = optional(launcher.local_rank), optional(launcher.local_size)
    counts, node = (
        environment.get(v) if v else None for v in (launcher.local_sizes, launcher.node)
    )
    if counts is not None and node is not None:
        local_size = tasks_of_node(counts, _place_of_node(environment) or node)
    if local_rank is not None and local_size is not None:
        name_of_size = str(launcher.local_size or launcher.local_sizes)
        _require_below(launcher.local_rank, local_rank, name_of_size, local_size)
    return Identity(
        rank,
        size,
        local_rank,
        local_size,
        environment.get(launcher.node) if launcher.node else None,
        optional(*launcher.nodes),
        name,
        "/".join(environment[v] for v in launcher.job if v in environment),
    )


def _place_of_node(environment: Mapping[str, str]) -> str | None:
    """Return the index of this process's node in Slurm's list of nodes.

    In a step of a heterogeneous job it is not the node's number: the list of nodes, and so that of
    their tasks, is sorted by name.
    """
    listed = environment.get("SLURM_STEP_NODELIST", "")
    with contextlib.suppress(InvalidArgumentError, ValueError):
        return str(expand_hostlist(listed).index(environment.get("SLURMD_NODENAME", "")))
    return None


def _require_no_contradiction(identity: Identity, environment: Mapping[str, str]) -> None:
    launcher = LAUNCHERS[identity.launcher]
    size = next(v for v in launcher.size if v in environment)
    for variable, same in (("RANK", launcher.rank), ("WORLD_SIZE", size)):
        if variable in environment and _whole(variable, environment) != _whole(same, environment):
            raise InvalidArgumentError(
                f"{variable}={environment[variable]}, but {same}={environment[same]} "
                f"({identity.launcher}): unset {variable}"
            )


def _whole(variable: str, environment: Mapping[str, str]) -> int:
    text = environment[variable].strip()
    if not text.isdecimal():
        raise InvalidArgumentError(f"{variable}={text!r}: must be a whole number")
    return int(text)


def _require_below(index_name: str, index: int, size_name: str, size: int) -> None:
    if not 0 <= index < size:
        raise InvalidArgumentError(
            f"{index_name}={index} is not below {size_name}={size}: ranks count from 0"
        )


_AGENT = "pt_elastic"  # the name of torchrun's process, since torch 2.5


def watched_launcher(identity: Identity) -> tuple[int, str]:
    """Return a pidfd of this process's parent, if that is a launcher, and a line for its end.

    A shell between the launcher and this process, or a notebook, is no launcher: its children may
    outlive it.

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
    except OSError:  # the parent has ended, or this kernel has no pidfds
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


# Variables that other launchers, not in `LAUNCHERS`, set for a rank.
_OTHER_RANKS = (
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
)
_TORCHRUN = "or type `torchrun --nproc-per-node 2 train.py`"


def why_not_alone(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason why a process without a launcher should probably be one of several ranks.

    Returns:
        A clause for the log, with the command to type. None for ``python train.py``, and for
        helpers of such a process: workers of a DataLoader or of a pool are daemons, and a spawned
        process may import a main module that calls init() at its top.
    """
    process = multiprocessing.current_process()
    if process.daemon or getattr(process, "_inheriting", False):
        return None
    if multiprocessing.parent_process() is not None:
        return (
            "multiprocessing has started it, and RANK is not set. Give each process its number, as "
            f"in init(rank=rank, size=2), {_TORCHRUN}"
        )
    for variable in _OTHER_RANKS:
        if variable in environment:
            return (
                f"{variable} is set, by a launcher that torch_ring does not know. Give each "
                f"process its number, as in init(rank=int(os.environ['{variable}']), size=2), "
                f"{_TORCHRUN}"
            )
    tasks = environment.get("SLURM_NTASKS", "")
    if tasks.isdecimal() and int(tasks) > 1:
        return f"SLURM_NTASKS={tasks}, and srun has not started it. Type `srun python train.py`"
    if "MASTER_ADDR" in environment:
        return (
            "MASTER_ADDR is set, and RANK and WORLD_SIZE are not. Set them in each process, "
            f"{_TORCHRUN}"
        )
    return None
