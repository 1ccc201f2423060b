"""JobFacts, exported, rank_environment: the environment variables of a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_ring.run.assignment import Slot

__all__ = ["JobFacts", "exported", "rank_environment"]

# Of this host or this shell, and so wrong on another host.
_OF_HOST = re.compile(
    r"BASH_FUNC_.*|DBUS_.*|DISPLAY|GPG_AGENT_INFO|HOME|HOSTNAME|HOSTTYPE|INVOCATION_ID"
    r"|JOURNAL_STREAM|LOGNAME|LS_COLORS|MAIL|OLDPWD|PWD|SHELL|SHLVL|SLURM_.*|SSH_.*|TERM.*|TMUX.*"
    r"|TMPDIR|USER|WINDOWID|XAUTHORITY|XDG_.*|_"
)


@dataclass(frozen=True)
class JobFacts:
    """What all ranks of a job have in common.

    Attributes:
        run_id: names this start of the job.
        secret: by which the ranks know one another.
        address, port: where rank 0 serves the store.
        interface: the network interface that the ranks use; empty: they choose.
        variables: more, which go before those of the launcher's environment.
        unset: variables that the launcher's environment has and a rank must not have.
    """

    run_id: str
    secret: str = field(repr=False)
    address: str
    port: int
    interface: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have a meaning on another host."""
    return {name: text for name, text in environment.items() if not _OF_HOST.fullmatch(name)}


def rank_environment(
    slot: Slot, job: JobFacts, environment: Mapping[str, str], is_local: bool, process: str = ""
) -> dict[str, str]:
    """Return the variables of a rank, which come on top of those of its host.

    Args:
        slot: the place of the rank.
        job: what it has in common with the others.
        environment: of the launcher, without the variables of launchers.
        is_local: whether the rank is on the launcher's host.
        process: the name of its process in an elastic job; empty: it needs none.
    """
    theirs = dict(environment) if is_local else exported(environment)
    theirs = {name: text for name, text in theirs.items() if name not in job.unset}
    theirs.setdefault("PYTHONUNBUFFERED", "1")  # what a rank prints is seen at once
    places = {
        "RANK": slot.rank,
        "SIZE": slot.size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_SIZE": slot.local_size,
        "CROSS_RANK": slot.cross_rank,
        "CROSS_SIZE": slot.cross_size,
    }
    horovods = {f"HOROVOD_{name}": str(place) for name, place in places.items()}
    own = {
        "TORCH_RING_RUN_ID": job.run_id,
        "TORCH_RING_SECRET": job.secret,
        "MASTER_ADDR": job.address,
        "MASTER_PORT": str(job.port),
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "GROUP_RANK": str(slot.node),
        "GROUP_WORLD_SIZE": str(slot.nodes),
        "HOROVOD_HOSTNAME": slot.host,
    }
    if process:
        own["TORCH_RING_PROCESS"] = process
    if job.interface:
        theirs.setdefault("NCCL_SOCKET_IFNAME", job.interface)
        own["TORCH_RING_INTERFACE"] = job.interface.partition(",")[0]
    return theirs | horovods | own | dict(job.variables)
