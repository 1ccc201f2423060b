# SPDX-License-Identifier: Apache-2.0
"""launch: runs a job from its options; environment_alone: prepares a job that needs no launch."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence

from torch_ring.config.horovod_path import alias_variables
from torch_ring.errors import InvalidArgumentError
from torch_ring.membership.directory import Directory
from torch_ring.membership.member import key_of
from torch_ring.native import NEEDS_LINUX, require_one_rank
from torch_ring.run.growth import Growth, standby_command
from torch_ring.run.host_connection import Ssh
from torch_ring.run.hosts import RankSlot, is_this_host
from torch_ring.run.job import Job
from torch_ring.run.job_settings import (
    JobFacts,
    JobSpec,
    discover_hosts,
    job_variables,
    rank_environment,
    secret_of,
    slots_of,
    slots_of_hosts,
)
from torch_ring.run.options import DEFAULT_GRACE_S, Options
from torch_ring.run.screen import Screen, Sink, say
from torch_ring.run.supervisor import Supervisor
from torch_ring.setup.network import own_address, own_loopback

__all__ = ["environment_alone", "launch"]


def launch(
    options: Options,
    environment: Mapping[str, str],
    sinks: tuple[Sink, Sink],
    *,
    signals: Callable[[], contextlib.AbstractContextManager[int]] | None = None,
    given: bytes = b"",
    has_result: bool = False,
) -> tuple[int, Job]:
    """Run a job to its end; return its exit code, and the job.

    Args:
        options: the user's options.
        environment: the launcher's environment, without the variables of launchers.
        sinks: the sinks for the ranks' output and errors.
        signals: a context that handles signals while ranks run, and yields a descriptor with their
            numbers; None: the launcher handles no signals.
        given: as in `JobSpec`.
        has_result: as in `JobSpec`.

    Raises:
        InvalidArgumentError: an option is wrong, or a host cannot run ranks.
        RingError: a host is not reached.
    """
    growth = options.growth
    if growth.standbys:
        standby_command(options.command)  # refuses a wrong command before anything starts
    variables, unset = job_variables(options.variables, environment)
    variables |= alias_variables({**environment, **variables})
    secret = secret_of(environment, variables)
    with contextlib.ExitStack() as stack:
        discovery = None
        if growth.script is not None:
            discovery = discover_hosts(growth, options.size, environment, variables, say)
            stack.callback(discovery.close)
            slots = slots_of_hosts(discovery.hosts, options.size, growth)
        else:
            slots = slots_of(options.size, options.hosts, options.hostfile, environment, say)
        growth.check(len(slots))
        directory = None
        if growth.least is not None:
            directory = Directory(_address_for(slots, options), key_of(secret))
            stack.callback(directory.close)
            variables["TORCH_RING_ELASTIC_DIRECTORY"] = directory.address
        spec = JobSpec(
            slots=slots,
            command=options.command,
            environment=environment,
            folder=os.getcwd(),
            secret=secret,
            interface=options.interface,
            variables=variables,
            unset=unset,
            start_timeout_s=options.start_timeout_s,
            grace_s=options.grace_s,
            growth=growth,
            given=given,
            has_result=has_result,
            is_verbose=options.is_verbose,
            numa_binding=options.numa_binding,
        )
        ssh = Ssh(options.ssh_port, options.ssh_identity_file, options.ssh_arguments)
        screen = Screen(*sinks, len(slots), options.output_folder, options.with_time)
        for note in options.notes:
            screen.say(note)
        grown = None
        if directory is not None:
            grown = Growth(growth, slots, directory, discovery, screen.say)
        reader = -1 if signals is None else stack.enter_context(signals())
        supervisor = Supervisor(screen, reader, options.is_verbose)
        job = Job(spec, supervisor, ssh, grown)
        try:
            return job.run(), job
        finally:
            supervisor.close()
            supervisor.drain(1.0)


def _address_for(slots: Sequence[RankSlot], options: Options) -> str:
    """Return an address of this host that all present and later hosts can reach."""
    interface = options.interface.partition(",")[0]
    others = [slot.host for slot in slots if not is_this_host(slot.host)]
    if others:
        return own_address(interface, others[0].rpartition("@")[2])
    return own_address(interface, None) if options.growth.script is not None else own_loopback()


def environment_alone(
    options: Options, environment: Mapping[str, str], source: str
) -> dict[str, str]:
    """Return the environment of a job's only rank, which macOS and Windows start without agents.

    Raises:
        InvalidArgumentError: an option is wrong, or needs Linux; or `source` wants several ranks.
    """
    needs_linux = {
        "--host-discovery-script": options.growth.script,
        "--standby": options.growth.standbys,
        "--output-filename": options.output_folder,
        "--prefix-output-with-timestamp": options.with_time,
        "--numa-binding": options.numa_binding,
        "--requeue": options.requeues,
        "--grace-period": options.grace_s != DEFAULT_GRACE_S,
    }
    for option in filter(needs_linux.get, needs_linux):
        raise InvalidArgumentError(f"{option} {NEEDS_LINUX}")
    slots = slots_of(options.size, options.hosts, options.hostfile, environment, say)
    require_one_rank(len(slots), source)
    if not is_this_host(slots[0].host):
        raise InvalidArgumentError(f"a rank on another host, {slots[0].host}, {NEEDS_LINUX}")
    options.growth.check(1)
    for note in options.notes:
        say(note)
    variables, unset = job_variables(options.variables, environment)
    variables |= alias_variables({**environment, **variables})
    secret = secret_of(environment, variables)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    facts = JobFacts(secrets.token_hex(8), secret, "127.0.0.1", port, "", variables, unset)
    return rank_environment(slots[0], facts, environment, is_local=True)
