# SPDX-License-Identifier: Apache-2.0
"""Hosts with deficiencies: init() works, or names the helpful setting, and the host for it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import namespaces
import pytest
from host_fixtures import on_hosts
from pool import error_of, run
from torch.distributed import FileStore

import torch_ring as hvd
from torch_ring.setup import connect
from torch_ring.setup.network import own_address

NOBODY = 65534
BRIEFLY = {"TORCH_RING_INIT_TIMEOUT": "2"}


def outcome_of_init() -> str:
    """Return the number of ranks of the world, or the reason why there is none."""
    text = error_of(hvd.init)[1]
    if hvd.is_initialized():
        text = f"{hvd.size()} ranks, {hvd.allgather_object(os.environ['RANK'])}"
        hvd.shutdown()
    return text


def outcomes(
    begin: Callable[..., str] = outcome_of_init,
    *args: object,
    where: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    transport: str = "",
) -> list[str]:
    return run(
        begin, 2, args=args, transport=transport, env=env, namespaces=where, initialized=False
    )


# --- addresses; the hosts of the tests have no default route


def init_over_a_file(path: str) -> str:
    """Call init() as mpirun's ranks do: MPI brings the address; no route leads to the others."""
    store = FileStore(path, 2)
    text = error_of(lambda: hvd.init(rank=int(os.environ["RANK"]), size=2, store=store))[1]
    if hvd.is_initialized():
        text = " ".join(hvd.allgather_object(own_address("", None)))
        hvd.shutdown()
    return text


class TestAddresses:
    pytestmark = on_hosts

    def test_hosts_without_a_default_route_find_their_own_addresses(self, hosts, tmp_path):
        found = outcomes(init_over_a_file, str(tmp_path / "store"), where=hosts[:2])
        assert found == [f"{namespaces.NETWORK}.1 {namespaces.NETWORK}.2"] * 2

    def test_a_loopback_address_is_not_given_to_other_hosts(self, hosts, tmp_path):
        env = {"TORCH_RING_INTERFACE": "lo"}
        for text in outcomes(init_over_a_file, str(tmp_path / "store"), where=hosts[:2], env=env):
            assert "rank 0's host has no other address than 127.0.0.1" in text
            assert "set TORCH_RING_INTERFACE there" in text

    def test_hosts_with_one_address(self, hosts, tmp_path):
        """As behind NAT, or with a bridge of containers."""
        for host in hosts[:2]:
            namespaces.run("ip", "-n", host, "addr", "add", "10.99.0.1/32", "dev", "eth0")
        try:
            env = {"TORCH_RING_INTERFACE": "10.99.0.1"}
            path = str(tmp_path / "store")
            for text in outcomes(init_over_a_file, path, where=hosts[:2], env=env):
                assert "the hosts of rank 0 and rank 1 have the same address 10.99.0.1" in text
                assert "set TORCH_RING_INTERFACE there" in text
        finally:
            for host in hosts[:2]:
                namespaces.run("ip", "-n", host, "addr", "del", "10.99.0.1/32", "dev", "eth0")

    @pytest.mark.slow
    def test_a_host_whose_loopback_has_ipv6_alone(self, hosts):
        with without_address(hosts[2], "127.0.0.1/8"):
            env = {"MASTER_ADDR": "127.0.0.1"}
            found = outcomes(where=[hosts[2]] * 2, env=env, transport="tcp")
            assert found == ["2 ranks, ['0', '1']"] * 2
            job = [sys.executable, "-m", "torch_ring.run", "-np", "2", "--min-np", "2"]
            code = "import torch_ring as hvd; hvd.init(); assert hvd.size() == 2"
            namespaces.run("ip", "netns", "exec", hosts[2], *job, sys.executable, "-c", code)

    def test_a_host_without_free_ports(self, hosts):
        for text in outcomes(init_without_ports, where=[hosts[2]] * 2):
            assert f"of its host {os.uname().nodename}: all ports" in text, text
            assert "net.ipv4.ip_local_port_range" in text


@contextlib.contextmanager
def without_address(host: str, address: str) -> Iterator[None]:
    """Take an address from the loopback interface of a host for a while."""
    namespaces.run("ip", "-n", host, "addr", "del", address, "dev", "lo")
    try:
        yield
    finally:
        namespaces.run("ip", "-n", host, "addr", "add", address, "dev", "lo")


def init_without_ports() -> str:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    ports.write_text("65535 65535")
    taken = []
    with_error = error_of(lambda: [taken.append(socket.create_server(("", 0))) for _ in range(3)])
    assert with_error[0] == "OSError"
    try:
        return outcome_of_init()
    finally:
        for each in taken:
            each.close()


# --- the system


def init_without_proc() -> str:
    class Absent:
        def __init__(self, path: str) -> None:
            self.path = path

        def read_text(self) -> str:
            raise FileNotFoundError(2, "No such file or directory", self.path)

    if os.environ["RANK"] == "1":
        connect.Path = Absent
    return outcome_of_init()


def test_a_host_without_proc():
    for text in outcomes(init_without_proc):
        assert f"rank 1 on {os.uname().nodename} cannot tell which ranks share its host" in text
        assert "mount -t proc proc /proc" in text
