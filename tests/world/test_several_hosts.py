# SPDX-License-Identifier: Apache-2.0
"""Several hosts: network namespaces that veth pairs join to a bridge."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import namespaces
import programs
import pytest
import torch
from dtype_checks import check_results
from host_fixtures import on_hosts, run_on_hosts
from logs import logged
from oracle import play_by_optimizer
from packet_loss import losing_packets
from pool import all_have_passed, error_of
from slow import slow

import torch_ring as hvd

pytestmark = on_hosts
SHAPES = [(3,), (30_011,)]  # inline, and in chunks


def check_everything() -> str:
    """Return the line that init() logs."""
    with logged() as lines:
        hvd.init()
    size, rank = hvd.size(), hvd.rank()
    check_results(dtypes=[torch.float32], shapes=SHAPES)
    hvd.barrier()
    play_by_optimizer(programs.plain, ("momentum",))
    kind, text = error_of(lambda: hvd.allreduce(torch.zeros(3 + rank), name="a"))
    assert kind == "MismatchError"
    assert "rank 0: allreduce 'a' float32 [3]" in text
    hvd.shutdown()
    join_a_part(rank, size)
    return "".join(lines)


def join_a_part(rank: int, size: int) -> None:
    """Join a world of the even or of the odd ranks; both find each other in the store of rank 0."""
    part = list(range(rank % 2, size, 2))
    hvd.init(comm=part)
    assert hvd.allgather(torch.tensor([rank])).tolist() == part
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize(
    ("layout", "connections"),
    [([0, 0, 1, 1], "1"), slow([0, 0, 1, 2], "2"), ([0, 1, 2], "3")],
    ids=str,
)
def test_layouts_of_ranks_on_hosts(hosts, layout, connections):
    env = {"TORCH_RING_CONNECTIONS": connections}
    lines = run_on_hosts(check_everything, hosts, layout, env=env, initialized=False)
    assert lines[0].startswith(f"{len(layout)} ranks")
    assert f"{namespaces.NETWORK}.1" in lines[0]
    assert ("shared memory" in lines[0]) == (len(set(layout)) < len(layout))
    assert lines[1:] == [""] * (len(layout) - 1)


# --- process sets


def use(members: hvd.ProcessSet) -> None:
    check_results(process_set=members, dtypes=[torch.float32], shapes=SHAPES)
    gathered = hvd.allgather_object({"rank": hvd.rank()}, process_set=members)
    assert gathered == [{"rank": rank} for rank in members.ranks or []]
    hvd.barrier(process_set=members)


def use_sets(sets: list[list[int]]) -> None:
    added = [hvd.add_process_set(ranks) for ranks in sets]
    for each in added:
        if each.included():
            use(each)
    hvd.barrier()
    for each in added:
        assert hvd.remove_process_set(each)
    hvd.barrier()


@pytest.mark.parametrize(
    ("layout", "sets"),
    [
        # Without the leaders of hosts (0 and 2; 0 and 1); one a host; several and one.
        ([0, 0, 1, 1], [[1, 3], [1, 2, 3], [1, 2], [2, 3], [0, 3]]),
        slow([0, 1, 0, 1, 0], [[2, 3, 4], [2, 4], [1, 2, 4], [3, 4]]),
    ],
    ids=str,
)
def test_sets_without_the_leaders_of_hosts(hosts, layout, sets):
    run_on_hosts(use_sets, hosts, layout, sets)


def outlive_the_leaders(leaders: list[int], passed: Path) -> tuple[str, str]:
    """The leaders of hosts die after the use of one set, and before the first use of another."""
    rest = [rank for rank in range(hvd.size()) if rank not in leaders]
    members, unused = hvd.add_process_set(rest), hvd.add_process_set(rest[1:])
    if members.included():
        use(members)
    hvd.barrier()
    all_have_passed(passed, hvd.size())
    if hvd.rank() in leaders:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(hvd.barrier)
    use(members)
    if unused.included():
        use(unused)
    return error


def test_a_set_goes_on_when_leaders_of_hosts_have_died(hosts, tmp_path):
    leaders = [0, 2]
    outcomes = run_on_hosts(
        outlive_the_leaders, hosts, [0, 0, 1, 1, 2, 2], leaders, tmp_path, may_die=leaders
    )
    for rank, outcome in enumerate(outcomes):
        if rank not in leaders:
            assert outcome[0] == "PeerLostError", outcomes


# --- links that lose packets


def cut_the_last_rank_off(passed: Path) -> str:
    """Cut the link of the last rank while all ranks reduce."""
    tensor = torch.ones(1 << 18)
    hvd.allreduce(tensor)
    all_have_passed(passed, hvd.size())
    if hvd.rank() == hvd.size() - 1:
        pull = ("ip", "link", "set", "eth0", "down")
        threading.Timer(0.3, namespaces.run, pull).start()
    kind = "nothing"
    while kind == "nothing":
        kind, text = error_of(lambda: hvd.allreduce(tensor))
    assert kind == "PeerLostError"
    return text


def test_a_cut_link_is_noticed(hosts, tmp_path):
    env = {"TORCH_RING_HEARTBEAT_TIMEOUT": "1.5"}
    try:
        errors = run_on_hosts(cut_the_last_rank_off, hosts, [0, 2], tmp_path, env=env)
    finally:
        namespaces.run("ip", "-n", hosts[2], "link", "set", "eth0", "up")
    assert f"rank 1 ({namespaces.NETWORK}.3, pid " in errors[0]
    assert "has not been heard for 1.5" in errors[0]


def leave_while_packets_get_lost() -> None:
    """Most packets get lost, from before the last collective until 3 s later or until the end."""
    tensor = torch.full((20_000,), float(hvd.rank()))
    hvd.allreduce(tensor)
    with contextlib.ExitStack() as until_left:
        loss = until_left.enter_context(contextlib.ExitStack())
        loss.enter_context(losing_packets("eth0", 0.6))
        healing = threading.Timer(3.0, loss.close)
        healing.start()
        until_left.callback(healing.join)
        for count in (20_000, 3):
            mean = hvd.allreduce(tensor[:count])
            assert mean.eq((hvd.size() - 1) / 2).all()
        hvd.shutdown()


@pytest.mark.slow
def test_the_end_of_a_job_survives_packet_loss(hosts, full):
    """A hundred jobs with --full: a quarter of an hour."""
    try:
        with losing_packets("lo", 0.0):
            pass
    except OSError as error:
        pytest.skip(f"no packets can be dropped here: {error}")
    for _ in range(100 if full else 1):
        run_on_hosts(leave_while_packets_get_lost, hosts, [0, 1, 2])
