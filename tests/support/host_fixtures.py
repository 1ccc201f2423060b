# SPDX-License-Identifier: Apache-2.0
"""hosts: network namespaces that stand for hosts, and ranks there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import namespaces
import pool
import pytest


@contextlib.contextmanager
def hosts_or_skip(count: int, **options: Any) -> Iterator[list[namespaces.Host]]:
    """Network namespaces of hosts that reach each other; removed afterwards."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(namespaces.hosts(count, **options))
        except OSError as error:
            if "netns add" not in str(error):
                raise
            pytest.skip(f"no network namespaces here: {error}")
        yield list(made)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """The names of three hosts."""
    with hosts_or_skip(3) as made:
        yield [host.namespace for host in made]


on_hosts = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)"),
]


def run_on_hosts(
    fn: Callable[..., Any],
    hosts: Sequence[str],
    layout: Sequence[int],
    *args: Any,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
    initialized: bool = True,
    deadline_s: float = pool.DEADLINE_S,
) -> list[Any]:
    """Call ``fn(*args)`` on a rank for each entry of `layout`, the number of its host."""
    return pool.run(
        fn,
        len(layout),
        args=args,
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1"} | dict(env or {}),
        may_die=may_die,
        initialized=initialized,
        deadline_s=deadline_s,
        namespaces=[hosts[host] for host in layout],
    )
