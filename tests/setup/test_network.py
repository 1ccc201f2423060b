# SPDX-License-Identifier: Apache-2.0
"""This host's address, as the other ranks can reach it."""

import pytest

from torch_ring.errors import InvalidArgumentError
from torch_ring.setup import network


def test_own_address(monkeypatch):
    routes = {"here": "127.0.1.1", "there": "10.0.0.7", network._ELSEWHERE: "192.168.0.7"}
    monkeypatch.setattr(network, "_source_address", lambda host: routes.get(host, host))
    assert network.own_address("", "there") == "10.0.0.7"
    assert network.own_address("", "127.0.0.1") == "127.0.0.1"
    assert network.own_address("", "localhost") == "localhost"
    assert network.own_address("", "here") == "192.168.0.7"  # no other host finds 127.0.1.1
    assert network.own_address("", "here", one_host=True) == "127.0.1.1"
    assert network.own_address("", None) == "192.168.0.7"
    assert network.own_address("lo", "there") == "127.0.0.1"


def test_own_address_is_that_of_an_interface_that_is_up_where_no_route_tells(monkeypatch):
    def unreachable(host):
        raise OSError(101, "Network is unreachable")

    def address_of(interface):
        if interface == "bare0":
            raise InvalidArgumentError("it has no address")
        return {"lo": "127.0.0.1", "eth1": "10.0.0.9"}[interface]

    monkeypatch.setattr(network, "_source_address", unreachable)
    monkeypatch.setattr(network, "address_of_interface", address_of)
    monkeypatch.setattr(network, "_interfaces_up", lambda: ["lo"])
    assert network.own_address("", None) == "127.0.0.1"
    monkeypatch.setattr(network, "_interfaces_up", lambda: ["lo", "bare0", "eth1"])
    assert network.own_address("", None) == "10.0.0.9"
    assert network.own_address("", "no-such-host.invalid") == "10.0.0.9"
    assert network.own_address("", "127.0.0.1") == "127.0.0.1"


def test_own_addresses_of_several_interfaces():
    assert network.own_addresses("lo,127.0.0.2", "there") == ["127.0.0.1", "127.0.0.2"]
    assert network.own_address("lo,nope0", "there") == "127.0.0.1"
    with pytest.raises(InvalidArgumentError, match="TORCH_RING_INTERFACE='nope0': must be"):
        network.own_addresses("lo,nope0", "there")
    with pytest.raises(InvalidArgumentError, match=r"lo and 127\.0\.0\.1 have the same address"):
        network.own_addresses("lo,127.0.0.1", "there")


def test_an_interface_that_is_down_is_told(monkeypatch):
    monkeypatch.setattr(network, "_is_up", lambda *_: False)
    with pytest.raises(InvalidArgumentError, match="'lo': it is down: `ip link set lo up`"):
        network.own_addresses("lo", "there")
