# SPDX-License-Identifier: Apache-2.0
"""Peer info, and the topology that follows from it."""

import pytest

from torch_ring._C import least_memory
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.setup import topology
from torch_ring.setup.peer_info import (
    HostInfo,
    PeerInfo,
    pack,
    pack_table,
    parse_table,
)
from torch_ring.setup.topology import Topology


def made_up_peer(rank: int, machine: str = "a", **more) -> PeerInfo:
    usual = {
        "shares": 1 << 45,
        "node": None,
        "local_rank": None,
        "local_size": None,
        "pid": 100 + rank,
        "addresses": [f"10.0.0.{ord(machine[-1]) - 96}"],
        "ports": [1],
        "socket": "s",
        "cpus": "3",
        "ucx": "",
    }
    return PeerInfo(rank=rank, machine=machine, **(usual | more))


def peers_on(machines: str) -> list[PeerInfo]:
    return [made_up_peer(rank, machine) for rank, machine in enumerate(machines)]


def table_of(peer: PeerInfo, **changed: object) -> bytes:
    """Return the table of a world of one rank, with changed fields."""
    return pack_table([HostInfo(peer.rank, 1, "", "", [{**peer.to_value(), **changed}])])


def test_peer_info_survives_the_table_and_nothing_else_is_accepted():
    mine = made_up_peer(0, node="7", local_rank=1)
    assert parse_table(table_of(mine), 1).peers == [mine]
    for table in (
        b"",
        pack({}),
        pack([1]),
        table_of(made_up_peer(2)),
        table_of(mine, cpus="x"),
        table_of(mine, ports=[True]),
        table_of(mine, ports=[]),
        table_of(mine, ports=[1, 2]),
    ):
        with pytest.raises(RingError, match="a rank runs another version"):
            parse_table(table, 1)


def test_a_rank_of_two_hosts_is_refused():
    hosts = [HostInfo(0, 1, "", "", [made_up_peer(0, machine).to_value()]) for machine in "ab"]
    assert parse_table(pack_table(hosts[:1]), 1).peers == [made_up_peer(0, "a")]
    with pytest.raises(RingError, match="a rank runs another version"):
        parse_table(pack_table(hosts), 1)


@pytest.mark.parametrize(
    ("machines", "rank", "expected"),
    [
        ("aa", 1, Topology(1, 2, 0, 1, True)),
        ("ab", 1, Topology(0, 1, 1, 2, True)),
        ("aabb", 2, Topology(0, 2, 1, 2, True)),
        ("abab", 3, Topology(1, 2, 1, 2, True)),
        ("abb", 1, Topology(0, 2, 1, 2, False)),
        ("abb", 2, Topology(1, 2, 0, 1, False)),
    ],
)
def test_topology_of_a_rank(machines, rank, expected):
    assert topology.topology_of(rank, peers_on(machines)) == expected


def test_ranks_share_the_cpus_that_they_are_bound_to():
    everyone = [
        made_up_peer(0, cpus="3"),
        made_up_peer(1, cpus="2"),
        made_up_peer(2, cpus="c"),
        made_up_peer(3, "b", cpus="3"),
    ]
    assert [topology.cpu_sharers(rank, everyone) for rank in range(4)] == [2, 2, 1, 1]


def test_the_launcher_decides_the_local_ranks():
    two_agents = [
        made_up_peer(rank, node=str(rank // 2), local_rank=1 - rank % 2, local_size=2)
        for rank in range(4)
    ]
    assert topology.topology_of(3, two_agents) == Topology(0, 2, 1, 2, True)


def test_hosts_of_ranks():
    assert topology.host_of(peers_on("bab"), "auto") == [0, 1, 0]
    assert topology.host_of(peers_on("aa"), "tcp") == [0, 1]
    with pytest.raises(InvalidArgumentError, match=r"TORCH_RING_TRANSPORT=shm.* 2 hosts"):
        topology.host_of(peers_on("ab"), "shm")
    none = [*peers_on("aa"), made_up_peer(2, shares=0)]
    assert topology.host_of(none, "auto") == [0, 1, 2]
    with pytest.raises(RingError, match=r"TORCH_RING_TRANSPORT=shm, but rank 2 has no shared"):
        topology.host_of(none, "shm")


def test_a_rank_with_little_address_space_makes_all_use_tcp():
    enough = least_memory(3)
    ranks = [*peers_on("aab"), made_up_peer(3, shares=enough), made_up_peer(4, "b")]
    assert topology.lack_of_memory(ranks) == ""
    assert topology.host_of(ranks, "auto") == [0, 0, 1, 0, 1]
    ranks[3] = made_up_peer(3, shares=enough - 1)
    assert topology.host_of(ranks, "auto") == [0, 1, 2, 3, 4]
    assert topology.host_of(ranks, "tcp") == [0, 1, 2, 3, 4]
    assert "rank 3 can map 65 MiB of shared memory, and the 3 ranks of its host need 66 MiB" in (
        topology.lack_of_memory(ranks)
    )
    with pytest.raises(RingError, match=r"shm, but rank 1 .* raise `ulimit -v`"):
        topology.host_of([made_up_peer(0), made_up_peer(1, shares=1 << 20)], "shm")


def test_labels_name_the_rank_and_its_host():
    assert topology.labels(peers_on("aa"))[1] == "rank 1 (pid 101)"
    assert topology.labels(peers_on("ab"))[1] == "rank 1 (10.0.0.2, pid 101)"


@pytest.mark.parametrize(
    ("cpus", "spins"), [(["1", "2"], True), (["1", "1"], False), (["3", "3"], True)]
)
def test_spinning_needs_a_cpu_for_every_rank_of_the_machine(cpus, spins):
    ranks = [made_up_peer(rank, cpus=mask) for rank, mask in enumerate(cpus)]
    assert topology.may_spin(0, [*ranks, made_up_peer(2, "b", cpus="1")]) == spins


def test_ranks_in_networks_of_their_own_share_a_kernels_cpus():
    ranks = [
        made_up_peer(rank, f"kernel/{network}", cpus="3") for rank, network in enumerate("abc")
    ]
    assert topology.host_of(ranks, "auto") == [0, 1, 2]
    assert topology.may_spin(0, ranks[:2])
    assert not topology.may_spin(0, ranks)
    assert topology.cpu_sharers(0, [*ranks, made_up_peer(3, "another/a", cpus="3")]) == 3
