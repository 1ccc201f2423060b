# SPDX-License-Identifier: Apache-2.0
"""JobSpec, slots_of, discover_hosts, ...: a job's settings from the users' options."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_ring.config import SETTINGS, Config
from torch_ring.config.horovod_path import alias_variables
from torch_ring.errors import InvalidArgumentError, TimeoutError
from torch_ring.run.hosts import (
    Discovery,
    HostSlots,
    RankSlot,
    assign,
    cluster_hosts,
    find_hosts,
    parse_hosts,
    read_hostfile,
)
from torch_ring.run.options import Options, seconds
from torch_ring.setup.launchers import Identity, discover
from torch_ring.setup.secret_file import read_secret

__all__ = [
    "JobSpec",
    "discover_hosts",
    "exported",
    "job_variables",
    "rank_environment",
    "secret_of",
    "slots_of",
]


@dataclass(frozen=True)
class JobSpec:
    """A job: the user's options, and the values that its ranks share.

    Attributes:
        options: the user's options.
        slots: the slots of the ranks with which the job begins, by rank.
        environment: the launcher's environment, without the variables of launchers.
        secret: the secret by which the ranks know one another.
        variables: additional variables of the ranks, which override the launcher's environment.
        unset: variables of the launcher's environment that a rank must not have.
        given: the standard input of each rank.
        has_result: whether a rank's last argument is the number of a descriptor, to which it writes
            its result.
        folder: the folder in which the ranks start.
        run_id: the name of this start of the job.
    """

    options: Options
    slots: Sequence[RankSlot]
    environment: Mapping[str, str]
    secret: str = field(repr=False)
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    given: bytes = field(default=b"", repr=False)
    has_result: bool = False
    folder: str = field(default_factory=os.getcwd)
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def start_timeout_s(self) -> float:
        """The time limit for reaching all hosts."""
        text = self.environment.get("HOROVOD_START_TIMEOUT", "30")
        try:
            return self.options.start_timeout or float(seconds(text))
        except argparse.ArgumentTypeError as error:
            raise InvalidArgumentError(f"HOROVOD_START_TIMEOUT={error}") from None

    @property
    def grace_s(self) -> float:
        """The grace period for the ranks after SIGINT, SIGTERM or SIGHUP."""
        return self.options.grace_period or 30.0


# Variables of this host or this shell, which would be wrong on another host.
_OF_HOST = re.compile(
    r"BASH_FUNC_.*|DBUS_.*|DISPLAY|GPG_AGENT_INFO|HOME|HOSTNAME|HOSTTYPE|INVOCATION_ID"
    r"|JOURNAL_STREAM|LOGNAME|LS_COLORS|MAIL|OLDPWD|PWD|SHELL|SHLVL|SLURM_.*|SSH_.*|TERM.*|TMUX.*"
    r"|TMPDIR|USER|WINDOWID|XAUTHORITY|XDG_.*|_"
)


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are valid on another host."""
    return {name: text for name, text in environment.items() if not _OF_HOST.fullmatch(name)}


def rank_environment(
    slot: RankSlot, job: JobSpec, store: tuple[str, int], is_local: bool, process: str = ""
) -> dict[str, str]:
    """Return the variables of a rank, to be added to those of its host.

    Args:
        slot: the place of the rank.
        job: the values that all ranks share.
        store: the address and the port at which rank 0 serves the store.
        is_local: whether the rank is on the launcher's host.
        process: the name of its process in an elastic job; empty: it needs none.
    """
    theirs = dict(job.environment) if is_local else exported(job.environment)
    theirs = {name: text for name, text in theirs.items() if name not in job.unset}
    theirs.setdefault("PYTHONUNBUFFERED", "1")  # show a rank's output at once
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
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
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
    if interface := job.options.network_interface:
        theirs.setdefault("NCCL_SOCKET_IFNAME", interface)
        own["TORCH_RING_INTERFACE"] = interface.partition(",")[0]
    return theirs | horovods | own | dict(job.variables)


_LOOK_S = 0.1
_OF_ONE_SHELL = ("python", "env", "horovodrun")  # such variables may be left over


def slots_of(
    options: Options, environment: Mapping[str, str], say: Callable[[str], None]
) -> list[RankSlot]:
    """Return the slots of a job's ranks.

    The hosts are the given ones; if none are given, those of the Slurm, Kubernetes, PBS or LSF job
    in which this process runs; or else this one. In such a job a line names the hosts.

    Args:
        options: the user's options.
        environment: the environment of this process.
        say: shows the user a line.

    Raises:
        InvalidArgumentError: the hosts or the size are wrong, or this process is one of several.
    """
    _require_one_launcher()
    size, where = options.num_proc, ""
    if options.hosts is not None:
        found = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        found = read_hostfile(options.hostfile)
    else:
        job = cluster_hosts(environment)
        if job is None and size is None:
            raise InvalidArgumentError("how many ranks? Give -np, or hosts and slots with -H")
        found, where = job or ([HostSlots("localhost", size or 1)], "")
    try:
        slots = assign(found, sum(host.slots for host in found) if size is None else size)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error} ({where})" if where else str(error)) from None
    if where:
        taken = Counter(slot.host for slot in slots)
        listed = ", ".join(f"{host}:{count}" for host, count in taken.items())
        say(f"the ranks run on hosts of this job ({where}): {listed}; -H chooses others")
    return slots


def discover_hosts(
    options: Options,
    environment: Mapping[str, str],
    variables: Mapping[str, str],
    say: Callable[[str], None],
) -> tuple[Discovery, list[RankSlot]]:
    """Return the hosts that a script finds, when they have enough slots to begin, and all slots.

    Args:
        options: the user's options.
        environment: the environment of this process.
        variables: the variables of the ranks, with the time that they may wait for one another.
        say: shows the user a line.

    Raises:
        RingError: the script fails at once.
        InvalidArgumentError: its output has another format; or this process is one of several.
        TimeoutError: there were too few slots for TORCH_RING_ELASTIC_TIMEOUT.
    """
    _require_one_launcher()
    script, most = str(options.host_discovery_script), options.max_num_proc
    least = options.num_proc or options.least or 1
    timeout_s = Config.from_environment({**environment, **variables}).elastic_timeout_s
    find = functools.partial(find_hosts, script, options.slots or 1, environment)
    discovery = Discovery(find)
    discovery.start()
    deadline = time.monotonic() + timeout_s
    said = ""
    while sum(host.slots for host in discovery.hosts) < least:
        found = ", ".join(f"{host.name}:{host.slots}" for host in discovery.hosts) or "no hosts"
        if found != said:
            said = found
            say(f"{script!r} has found {found}: waits for slots for {least} ranks")
        if time.monotonic() > deadline:
            discovery.close()
            raise TimeoutError(
                f"{script!r} has found {found} within {timeout_s:g} s (--elastic-timeout), and "
                f"there are to be {least} ranks"
            )
        time.sleep(_LOOK_S)
    there = sum(host.slots for host in discovery.hosts)
    wanted = max(options.num_proc or 0, there if most is None else min(there, most))
    return discovery, assign(discovery.hosts, wanted)


def secret_of(environment: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """Return the secret that the user has chosen, or a new one."""
    names = ("TORCH_RING_SECRET", "TORCH_RING_SECRET_FILE")
    given = {name: variables.get(name) or environment.get(name, "") for name in names}
    chosen = Config.from_environment(given)
    if chosen.secret_file and not chosen.secret:
        return read_secret(chosen.secret_file)
    return chosen.secret or secrets.token_hex(32)


def job_variables(
    options: Options, environment: Mapping[str, str]
) -> tuple[dict[str, str], frozenset[str]]:
    """Return the variables that options give the ranks, and those that they must not have.

    Args:
        options: the user's options.
        environment: the launcher's environment.

    Raises:
        InvalidArgumentError: a variable without a value is not set here, or Horovod is installed
            where TORCH_RING_AS_HOROVOD would hide it.
    """
    variables = dict(options.variables)
    if options.least is not None:
        variables["TORCH_RING_MIN_RANKS"] = str(options.least)
    for name, value in (options.env or {}).items():
        if value is None and name not in environment:
            raise InvalidArgumentError(f"--env {name}: is not set here: give a value, {name}=...")
        variables[name] = environment[name] if value is None else value
    variables |= alias_variables({**environment, **variables})
    # An option overrides the environment, also variables that take precedence over its own.
    unset = {
        setting.variable
        for setting in SETTINGS
        if any(alias in variables for alias, _ in setting.aliases)
    }
    unset |= {"TORCH_RING_SECRET_FILE"}  # the secret itself is sent; other hosts may lack the file
    return variables, frozenset(unset - variables.keys())


def _require_one_launcher() -> None:
    identity = Identity()
    with contextlib.suppress(InvalidArgumentError):  # leftover variables of some launcher
        identity = discover()
    if identity.size > 1 and identity.launcher not in _OF_ONE_SHELL:
        raise InvalidArgumentError(
            f"{identity.launcher} has started this launcher as rank {identity.rank} of "
            f"{identity.size}: start it once, or let {identity.launcher} start the ranks"
        )
