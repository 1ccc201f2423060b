"""Hosts with two network interfaces each: network namespaces with two veth pairs."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
import torch
from namespaces import Host
from pool import all_have_passed, error_of, run

import torch_ring as hvd

PORT = "29511"
MIB = 1 << 20
BOTH = {"TORCH_RING_INTERFACE": "eth0,eth1"}

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)"),
]


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


def on_hosts(
    function, hosts: list[Host], *args, env: dict[str, str], may_die: tuple[int, ...] = ()
) -> list:
    """Return the results of a function on a rank of each host."""
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT}
    return run(
        function,
        len(hosts),
        args=args,
        initialized=False,
        transport="",
        env=where | env,
        may_die=may_die,
        namespaces=[host.namespace for host in hosts],
    )


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


@pytest.mark.parametrize("connections", ["1", "2"])
def test_both_interfaces_carry_half_of_the_data(two_hosts, connections):
    env = BOTH | {"TORCH_RING_CONNECTIONS": connections}
    for sent in on_hosts(sent_by_allreduces, two_hosts, 2, 4, env=env):
        all_sent = sent["eth0"] + sent["eth1"]
        assert all_sent >= 8 * MIB  # each of two ranks sends the tensor's bytes once
        for name in ("eth0", "eth1"):
            assert 0.45 < sent[name] / all_sent < 0.55, sent


def test_survivors_use_both_interfaces(two_hosts):
    first, second = two_hosts
    hosts = [first, first, second]
    first_one, died, other = on_hosts(sent_after_a_death, hosts, 4, env=BOTH, may_die=(1,))
    assert died is None
    for sent in (first_one, other):
        all_sent = sent["eth0"] + sent["eth1"]
        assert all_sent >= 4 * MIB
        assert 0.4 < sent["eth0"] / all_sent < 0.6, sent


def test_without_the_setting_one_interface_carries_all(two_hosts):
    for sent in on_hosts(sent_by_allreduces, two_hosts, 1, 1, env={}):
        assert sent["eth0"] >= MIB
        assert sent["eth1"] < MIB // 16, sent


def init_fails(settings: list[str], passed: Path) -> str:
    """Return the text of the error of init() with a setting for each rank."""
    os.environ["TORCH_RING_INTERFACE"] = settings[int(os.environ["RANK"])]
    text = error_of(hvd.init)[1]
    all_have_passed(passed, len(settings))  # rank 0 serves the store, which reports the error
    return text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["eth0,eth1", "eth1"], "host 10.214.88.1 has 2, and rank 1's host 10.214.89.2 has 1"),
        (["eth0,eth7", "eth0,eth1"], "TORCH_RING_INTERFACE='eth7': must be an address of"),
    ],
    ids=["numbers differ", "unknown"],
)
def test_interfaces_that_cannot_be_used_are_told_to_all_ranks(two_hosts, settings, text, tmp_path):
    for error in on_hosts(init_fails, two_hosts, settings, tmp_path, env={}):
        assert text in error
        assert "TORCH_RING_INTERFACE" in error


def test_an_interface_that_is_down_is_told_to_all_ranks(two_hosts, tmp_path):
    namespaces.run("ip", "-n", two_hosts[1].namespace, "link", "set", "eth1", "down")
    try:
        for error in on_hosts(init_fails, two_hosts, ["eth0,eth1"] * 2, tmp_path, env={}):
            assert "TORCH_RING_INTERFACE='eth1': it is down: `ip link set eth1 up`" in error
    finally:
        namespaces.run("ip", "-n", two_hosts[1].namespace, "link", "set", "eth1", "up")
