"""The cost of the exchange between hosts: operations of the store, and bytes."""

import pytest
import world_limits
from made_up import card, exchange_between_hosts, group

from torch_ring.setup.host_exchange import CHUNK_BYTES
from torch_ring.setup.peer_info import parse_table


@pytest.mark.parametrize("size", [8, 16, 64, 512, 4096])
def test_operations_of_a_host(size):
    tables, clients = exchange_between_hosts(size)
    hosts = size // 8
    for client in clients[1:]:
        assert client.total() == 3  # a place, the card, the table
        assert client.counts["check"] == 1
    # Rank 0's leader reads a card of each other host; all together, that is 4 for each.
    assert clients[0].total() == 1 + (hosts - 1) + 2
    assert clients[0].counts["check"] == hosts - 1
    assert sum(client.total() for client in clients) <= 4 * hosts
    assert len(set(tables)) == 1
    peers = parse_table(tables[0], size).peers
    assert [peer.rank for peer in peers] == list(range(size))
    assert peers[-1].card() == card(size - 1, hosts - 1)


@pytest.mark.slow
def test_20000_cards_pass_through():
    size = 20_000
    tables, clients = exchange_between_hosts(size)
    assert max(client.largest for client in clients) <= CHUNK_BYTES < 1 << 20
    assert all(client.total() <= 4 for client in clients[1:])
    peers, secret, is_private = parse_table(tables[-1], size)
    assert len(secret) == 32
    assert not is_private
    assert peers[12_345].card() == card(12_345, 12_345 // 8)
    # The scaling model counts with that.
    assert len(tables[0]) == pytest.approx(world_limits.TABLE_BYTES * size, rel=0.1)


def test_a_table_of_several_chunks(monkeypatch):
    monkeypatch.setattr("torch_ring.setup.host_exchange.CHUNK_BYTES", 1000)
    tables, clients = exchange_between_hosts(256)
    assert 900 < max(client.largest for client in clients) <= 1000
    assert clients[1].counts["get"] > 4
    assert len(parse_table(tables[5], 256).peers) == 256


@pytest.mark.parametrize(("count", "most_bytes"), [(1, 400), (8, 700), (512, 17_000)])
def test_bytes_of_a_card(count, most_bytes):
    assert len(group(range(count), count).to_bytes()) <= most_bytes
