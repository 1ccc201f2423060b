# SPDX-License-Identifier: Apache-2.0
"""environment_alone: a job of one rank on a system that has no native module."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping

from torch_ring.config.horovod_path import alias_variables
from torch_ring.errors import InvalidArgumentError
from torch_ring.native import NEEDS_LINUX, require_one_rank
from torch_ring.run.hosts import is_this_host
from torch_ring.run.job_settings import (
    JobFacts,
    job_variables,
    rank_environment,
    secret_of,
    slots_of,
)
from torch_ring.run.options import DEFAULT_GRACE_S, Options
from torch_ring.run.screen import say

__all__ = ["environment_alone"]


def environment_alone(
    options: Options, environment: Mapping[str, str], source: str
) -> dict[str, str]:
    """Return the environment of the job's only rank, as the launcher gives it under Linux.

    Notes on options without effect are shown.

    Args:
        options: the user's options.
        environment: the launcher's environment, without the variables of launchers.
        source: the name of the launcher in errors.

    Raises:
        InvalidArgumentError: an option is wrong, or needs Linux, as several ranks and other hosts.
    """
    growth = options.growth
    needs_linux = {
        "--host-discovery-script": growth.script,
        "--standby": growth.standbys,
        "--output-filename": options.output_folder,
        "--prefix-output-with-timestamp": options.with_time,
        "--numa-binding": options.numa_binding,
        "--requeue": options.requeues,
        "--grace-period": options.grace_s != DEFAULT_GRACE_S,
    }
    for option, value in needs_linux.items():
        if value:
            raise InvalidArgumentError(f"{option} {NEEDS_LINUX}")
    slots = slots_of(options.size, options.hosts, options.hostfile, environment, say)
    require_one_rank(len(slots), source)
    growth.check(1)
    if not is_this_host(slots[0].host):
        raise InvalidArgumentError(f"a rank on another host, {slots[0].host}, {NEEDS_LINUX}")
    for note in options.notes:
        say(note)
    variables, unset = job_variables(options.variables, environment)
    variables |= alias_variables({**environment, **variables})
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    facts = JobFacts(
        run_id=secrets.token_hex(8),
        secret=secret_of(environment, variables),
        address="127.0.0.1",
        port=port,
        variables=variables,
        unset=unset,
    )
    return rank_environment(slots[0], facts, environment, is_local=True)
