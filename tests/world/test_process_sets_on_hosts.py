"""Process sets across hosts, of ranks that lead no host, or whose host's leader has died."""

import os
import shutil
import signal
from pathlib import Path

import namespaces
import pytest
import torch
from pool import all_have_passed, error_of, run
from slow import slow

import torch_ring as hvd

PORT = "29512"

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)"),
]


def run_on_hosts(fn, hosts, layout, args=(), may_die=()):
    """Run `fn` on ranks of hosts by `layout`."""
    return run(
        fn,
        len(layout),
        args=args,
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": PORT},
        may_die=may_die,
        namespaces=[hosts[host] for host in layout],
    )


def use_every_collective(members: hvd.ProcessSet, count: int) -> None:
    """Call each collective once on the members."""
    ranks, size, own = members.ranks or [], members.size(), hvd.rank()
    index, total = members.rank(), sum(members.ranks or [])
    mine = torch.full((count,), float(own))
    assert (hvd.allreduce(mine, op=hvd.Sum, process_set=members) == total).all()
    assert (hvd.allreduce(mine, op=hvd.Max, process_set=members) == max(ranks)).all()
    assert (hvd.broadcast(mine, root_rank=ranks[-1], process_set=members) == ranks[-1]).all()
    rows = hvd.allgather(torch.full((count + index, 1), own), process_set=members)
    want = [torch.full((count + i, 1), rank) for i, rank in enumerate(ranks)]
    assert torch.equal(rows, torch.cat(want))
    grouped = hvd.grouped_allreduce([mine, mine[:3]], op=hvd.Sum, process_set=members)
    assert all((tensor == total).all() for tensor in grouped)
    part = hvd.reducescatter(
        torch.arange(size * count).float() + own, op=hvd.Sum, process_set=members
    )
    own_part = torch.arange(index * count, (index + 1) * count).float()
    assert torch.equal(part, own_part * size + total)
    parts = (torch.arange(size).repeat_interleave(count) + 100 * own).float()
    exchanged, _ = hvd.alltoall(
        parts, splits=torch.full((size,), count, dtype=torch.int64), process_set=members
    )
    assert torch.equal(
        exchanged, torch.cat([torch.full((count,), 100.0 * r + index) for r in ranks])
    )
    assert hvd.allgather_object({"rank": own}, process_set=members) == [{"rank": r} for r in ranks]
    hvd.barrier(process_set=members)


def use_sets(sets: list[list[int]]) -> None:
    added = [hvd.add_process_set(ranks) for ranks in sets]
    for each in added:
        if each.included():
            for count in (2, 70_001):
                use_every_collective(each, count)
    hvd.barrier()
    for each in added:
        assert hvd.remove_process_set(each)
    hvd.barrier()


@pytest.mark.parametrize(
    ("layout", "sets"),
    [
        # Without the leaders of hosts (0 and 2; 0, 2 and 4); one a host; several and one.
        ([0, 0, 1, 1], [[1, 3], [1, 2, 3], [1, 2], [2, 3], [0, 3]]),
        slow([0, 0, 1, 1, 2, 2], [[1, 3, 5], [1, 2, 3, 5], [2, 3, 4, 5], [1, 3]]),
        slow([0, 1, 0, 1, 0], [[2, 3, 4], [2, 4], [1, 2, 4], [3, 4]]),
    ],
    ids=str,
)
def test_sets_without_the_leaders_of_hosts(hosts, layout, sets):
    run_on_hosts(use_sets, hosts, layout, (sets,))


def outlive_the_leaders(leaders: list[int], passed: Path) -> tuple[str, str]:
    """The leaders of hosts die after the use of one set, and before the first use of another."""
    rest = [rank for rank in range(hvd.size()) if rank not in leaders]
    members, unused = hvd.add_process_set(rest), hvd.add_process_set(rest[1:])
    if members.included():
        use_every_collective(members, 2)
    hvd.barrier()
    all_have_passed(passed, hvd.size())
    if hvd.rank() in leaders:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(hvd.barrier)
    for _ in range(3):
        use_every_collective(members, 70_001)
        if unused.included():
            use_every_collective(unused, 70_001)
    return error


@pytest.mark.parametrize(
    ("layout", "leaders"), [slow([0, 0, 0, 1, 1, 1], [0, 3]), ([0, 0, 1, 1, 2, 2], [0, 2])], ids=str
)
def test_a_set_goes_on_when_leaders_of_hosts_have_died(hosts, layout, leaders, tmp_path):
    outcomes = run_on_hosts(
        outlive_the_leaders, hosts, layout, (leaders, tmp_path), may_die=leaders
    )
    for rank, outcome in enumerate(outcomes):
        if rank not in leaders:
            assert outcome[0] == "PeerLostError", outcomes
