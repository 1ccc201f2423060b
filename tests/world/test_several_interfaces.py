# SPDX-License-Identifier: Apache-2.0
"""Hosts with two network interfaces each: network namespaces with two veth pairs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
import torch
from host_fixtures import on_hosts, run_on_hosts
from namespaces import Host

import torch_ring as hvd

MIB = 1 << 20
BOTH = {"TORCH_RING_INTERFACE": "eth0,eth1", "TORCH_RING_CONNECTIONS": "2"}

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


def sent_bytes() -> dict[str, int]:
    """Return the bytes that have left each interface of this network namespace."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return {name.rstrip(":"): int(numbers[8]) for name, *numbers in lines}


def sent_by_allreduces() -> dict[str, int]:
    """Return the bytes that leave each interface in two allreduces."""
    hvd.init()
    tensor = torch.full((MIB,), float(hvd.rank()))  # of four bytes each
    hvd.barrier()
    before = sent_bytes()
    for _ in range(2):
        assert (hvd.allreduce(tensor, op=hvd.Sum) == 1).all()
    hvd.barrier()  # the other rank has received everything
    after = sent_bytes()
    hvd.shutdown()
    return {name: after[name] - before[name] for name in before}


def test_both_interfaces_carry_half_of_the_data(two_hosts):
    names = [host.namespace for host in two_hosts]
    for sent in run_on_hosts(sent_by_allreduces, names, range(2), env=BOTH, initialized=False):
        all_sent = sent["eth0"] + sent["eth1"]
        assert all_sent >= 8 * MIB  # each of two ranks sends the tensor's bytes once
        for name in ("eth0", "eth1"):
            assert 0.45 < sent[name] / all_sent < 0.55, sent
