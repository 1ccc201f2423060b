# SPDX-License-Identifier: Apache-2.0
"""Hosts with two network interfaces each: network namespaces with two veth pairs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import namespaces
import pytest
import torch
from host_fixtures import on_hosts, run_on_hosts
from namespaces import Host

import torch_ring as hvd

MIB = 1 << 20
BOTH = {"TORCH_RING_INTERFACE": "eth0,eth1"}

pytestmark = on_hosts


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[Host]]:
    """Hosts with two interfaces, each limited to 100 Mbit/s; removed afterwards."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(namespaces.hosts(2, rate="100mbit", interfaces=2))
        except OSError as error:
            if "netns add" not in str(error):
                raise
            pytest.skip(f"no network namespaces here: {error}")
        yield list(made)


def on_each(
    fn: Callable[..., Any], hosts: list[Host], *args: Any, env: dict[str, str], **more: Any
) -> list[Any]:
    """Return the results of a function on a rank of each host."""
    names = [host.namespace for host in hosts]
    return run_on_hosts(fn, names, range(len(names)), *args, env=env, initialized=False, **more)


def sent_bytes() -> dict[str, int]:
    """Return the bytes that have left each interface of this network namespace."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return {name.rstrip(":"): int(numbers[8]) for name, *numbers in lines}


def sent_by_allreduces(count: int, mib: int) -> dict[str, int]:
    """Return the bytes that leave each interface in `count` allreduces."""
    hvd.init()
    sent = sent_in_this_world(count, mib)
    hvd.shutdown()
    return sent


def sent_in_this_world(count: int, mib: int) -> dict[str, int]:
    tensor = torch.full((mib * MIB // 4,), float(hvd.rank()))
    hvd.barrier()
    before = sent_bytes()
    for _ in range(count):
        assert (hvd.allreduce(tensor, op=hvd.Sum) == 1).all()
    hvd.barrier()  # the other rank has received everything
    after = sent_bytes()
    return {name: after[name] - before[name] for name in before}


def sent_after_a_death(mib: int) -> dict[str, int]:
    """Return the bytes that leave each interface in an allreduce after the death of rank 1.

    Another rank on its host lives on.
    """
    hvd.init()
    dies = hvd.rank() == 1

    @hvd.elastic.run
    def train(_: hvd.elastic.ObjectState) -> dict[str, int]:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return sent_in_this_world(1, mib)

    sent = train(hvd.elastic.ObjectState())
    hvd.shutdown()
    return sent


def test_both_interfaces_carry_half_of_the_data(two_hosts):
    env = BOTH | {"TORCH_RING_CONNECTIONS": "2"}
    for sent in on_each(sent_by_allreduces, two_hosts, 2, 4, env=env):
        all_sent = sent["eth0"] + sent["eth1"]
        assert all_sent >= 8 * MIB  # each of two ranks sends the tensor's bytes once
        for name in ("eth0", "eth1"):
            assert 0.45 < sent[name] / all_sent < 0.55, sent


def test_survivors_use_both_interfaces(two_hosts):
    first, second = two_hosts
    hosts = [first, first, second]
    first_one, died, other = on_each(sent_after_a_death, hosts, 4, env=BOTH, may_die=(1,))
    assert died is None
    for sent in (first_one, other):
        all_sent = sent["eth0"] + sent["eth1"]
        assert all_sent >= 4 * MIB
        assert 0.4 < sent["eth0"] / all_sent < 0.6, sent


def test_without_the_setting_one_interface_carries_all(two_hosts):
    for sent in on_each(sent_by_allreduces, two_hosts, 1, 1, env={}):
        assert sent["eth0"] >= MIB
        assert sent["eth1"] < MIB // 16, sent
