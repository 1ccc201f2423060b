# SPDX-License-Identifier: Apache-2.0
"""The cost of the exchange between hosts: operations of the store, and bytes."""

import pytest
from made_up import exchange_between_hosts, group, info

from torch_ring.setup.peer_info import HostInfo, pack, pack_table, parse_table
from torch_ring.setup.store_exchange import CHUNK_BYTES

TABLE_BYTES = 33  # of each rank, in the table of all ranks


def table_of(values, size):
    return pack_table([HostInfo.of_value(value, size) for value in values])


@pytest.mark.parametrize("size", [8, 16, 512])
def test_operations_of_a_host(size):
    values, clients = exchange_between_hosts(size)
    hosts = size // 8
    for client in clients[1:]:
        assert client.total() == 3  # a place, the value, the values of all
        assert client.counts["check"] == 1
    # Rank 0's leader reads a value of each other host; in total that is 4 for each.
    assert clients[0].total() == 1 + (hosts - 1) + 2
    assert clients[0].counts["check"] == hosts - 1
    assert sum(client.total() for client in clients) <= 4 * hosts
    assert len(values) == min(hosts, 2)
    assert values[-1] == values[0]
    peers = parse_table(table_of(values[0], size), size).peers
    assert [peer.rank for peer in peers] == list(range(size))
    assert peers[-1].to_value() == info(size - 1, hosts - 1)


@pytest.mark.slow
def test_4096_ranks_pass_through():
    size = 4096
    values, clients = exchange_between_hosts(size)
    assert max(client.largest for client in clients) <= CHUNK_BYTES < 1 << 20
    assert all(client.total() <= 4 for client in clients[1:])
    peers, secret, is_private = parse_table(table_of(values[-1], size), size)
    assert len(secret) == 32
    assert not is_private
    assert peers[3210].to_value() == info(3210, 3210 // 8)
    # The scaling model uses this count.
    assert len(pack(values[0])) == pytest.approx(TABLE_BYTES * size, rel=0.1)


def test_values_in_several_chunks(monkeypatch):
    monkeypatch.setattr("torch_ring.setup.store_exchange.CHUNK_BYTES", 1000)
    values, clients = exchange_between_hosts(256)
    assert 900 < max(client.largest for client in clients) <= 1000
    assert clients[1].counts["get"] > 4
    assert len(parse_table(table_of(values[-1], 256), 256).peers) == 256


@pytest.mark.parametrize(("count", "most_bytes"), [(1, 400), (8, 700), (512, 17_000)])
def test_bytes_of_a_value(count, most_bytes):
    assert len(pack(group(range(count), count).to_value())) <= most_bytes
