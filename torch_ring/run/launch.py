# SPDX-License-Identifier: Apache-2.0
"""launch: runs a job from its options; environment_alone: prepares a job that needs no launch."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence

from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError
from torch_ring.membership.directory import Directory
from torch_ring.membership.member import key_of
from torch_ring.native import NEEDS_LINUX, require_one_rank
from torch_ring.run.growth import Growth, standby_command
from torch_ring.run.hosts import RankSlot, is_this_host
from torch_ring.run.job import Job
from torch_ring.run.job_settings import (
    JobSpec,
    discover_hosts,
    job_variables,
    rank_environment,
    secret_of,
    slots_of,
)
from torch_ring.run.options import Options
from torch_ring.run.screen import Screen, Sink, say
from torch_ring.run.supervisor import Supervisor
from torch_ring.setup.network import own_address, own_loopback

__all__ = ["environment_alone", "launch"]

_NEEDS_LINUX = (
    "host_discovery_script",
    "standby",
    "output_filename",
    "prefix_output_with_timestamp",
    "numa_binding",
    "requeue",
    "grace_period",
)


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
    if options.standby:
        standby_command(options.command)  # refuses a wrong command before anything starts
    variables, unset = job_variables(options, environment)
    secret = secret_of(environment, variables)
    with contextlib.ExitStack() as stack:
        discovery = directory = None
        if options.host_discovery_script is not None:
            discovery, slots = discover_hosts(options, environment, variables, say)
            stack.callback(discovery.close)
        else:
            slots = slots_of(options, environment, say)
        options.check_size(len(slots))
        if options.least is not None:
            config = Config.from_environment({**environment, **variables})
            directory = Directory(_address_for(slots, options), key_of(secret, config.tls))
            stack.callback(directory.close)
            variables["TORCH_RING_ELASTIC_DIRECTORY"] = directory.address
        spec = JobSpec(options, slots, environment, secret, variables, unset, given, has_result)
        screen = Screen(
            *sinks, len(slots), options.output_filename, options.prefix_output_with_timestamp
        )
        for note in options.notes:
            screen.say(note)
        growth = Growth(options, slots, directory, discovery, screen.say)
        reader = -1 if signals is None else stack.enter_context(signals())
        supervisor = Supervisor(spec, screen, reader)
        job = Job(spec, supervisor, growth)
        try:
            return job.run(), job
        finally:
            supervisor.close()
            supervisor.drain(1.0)


def _address_for(slots: Sequence[RankSlot], options: Options) -> str:
    """Return an address of this host that all present and later hosts can reach."""
    interface = options.network_interface.partition(",")[0]
    others = [slot.host for slot in slots if not is_this_host(slot.host)]
    if others:
        return own_address(interface, others[0].rpartition("@")[2])
    return (
        own_address(interface, None)
        if options.host_discovery_script is not None
        else own_loopback()
    )


def environment_alone(
    options: Options, environment: Mapping[str, str], source: str
) -> dict[str, str]:
    """Return the environment of a job's only rank, which macOS and Windows start without agents.

    Raises:
        InvalidArgumentError: an option is wrong, or needs Linux; or `source` wants several ranks.
    """
    for name in filter(lambda name: getattr(options, name), _NEEDS_LINUX):
        raise InvalidArgumentError(f"--{name.replace('_', '-')} {NEEDS_LINUX}")
    slots = slots_of(options, environment, say)
    require_one_rank(len(slots), source)
    options.check_size(1)
    if not is_this_host(slots[0].host):
        raise InvalidArgumentError(f"a rank on another host, {slots[0].host}, {NEEDS_LINUX}")
    for note in options.notes:
        say(note)
    variables, unset = job_variables(options, environment)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    spec = JobSpec(options, slots, environment, secret_of(environment, variables), variables, unset)
    return rank_environment(slots[0], spec, ("127.0.0.1", port), is_local=True)
