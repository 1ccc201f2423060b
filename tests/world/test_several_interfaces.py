# SPDX-License-Identifier: Apache-2.0
"""Hosts with two network interfaces each: network namespaces with two veth pairs."""

from __future__ import annotations

from pathlib import Path

import torch
from host_fixtures import hosts_or_skip, on_hosts, run_on_hosts

import torch_ring as hvd

MIB = 1 << 20
BOTH = {"TORCH_RING_INTERFACE": "eth0,eth1", "TORCH_RING_CONNECTIONS": "2"}

pytestmark = on_hosts


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


def test_both_interfaces_carry_half_of_the_data():
    """Each is limited to 100 Mbit/s."""
    with hosts_or_skip(2, rate="100mbit", interfaces=2) as hosts:
        names = [host.namespace for host in hosts]
        found = run_on_hosts(sent_by_allreduces, names, range(2), env=BOTH, initialized=False)
    for sent in found:
        all_sent = sent["eth0"] + sent["eth1"]
        assert all_sent >= 8 * MIB  # each of two ranks sends the tensor's bytes once
        for name in ("eth0", "eth1"):
            assert 0.45 < sent[name] / all_sent < 0.55, sent
