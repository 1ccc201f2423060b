"""Several hosts: network namespaces that veth pairs join to a bridge."""

import contextlib
import logging
import os
import shutil
import threading
from pathlib import Path

import namespaces
import pytest
import torch
from packet_loss import losing_packets
from pool import all_have_passed, error_of, run
from slow import slow

import torch_ring as hvd

PORT = "29511"

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)"),
]


def line_logged_by_init() -> str:
    """Return the line that init() logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torch_ring").addHandler(handler)
    logging.getLogger("torch_ring").setLevel("INFO")
    hvd.init()
    return "".join(lines)


def check_everything() -> str:
    line = line_logged_by_init()
    size, rank = hvd.size(), hvd.rank()
    for count in (1, 1000, 200_003):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            mine = (torch.arange(count) % 7 + rank).to(dtype)
            want = (torch.arange(count) % 7) * size + size * (size - 1) // 2
            assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), want.to(dtype))
            for root in range(size):
                want = (torch.arange(count) % 7 + root).to(dtype)
                assert torch.equal(hvd.broadcast(mine, root_rank=root), want)
        rows = torch.full((rank * count, 2), float(rank))
        want = torch.cat([torch.full((r * count, 2), float(r)) for r in range(size)])
        assert torch.equal(hvd.allgather(rows), want)
    hvd.barrier()
    check_process_sets()
    check_training()
    kind = "nothing"
    try:
        hvd.allreduce(torch.zeros(3 + rank), name="a")
    except hvd.MismatchError as error:
        kind = str(error)
    assert "rank 0: allreduce 'a' float32 [3]" in kind
    hvd.shutdown()
    join_a_part(rank, size)
    return line


def check_process_sets() -> None:
    """Use sets inside a host, across hosts, and of a part of each host."""
    size, rank = hvd.size(), hvd.rank()
    for ranks in ([0, 1], [size - 1, 0], list(range(1, size)), list(range(0, size, 2))):
        if len(ranks) == size or hvd.ProcessSet(ranks).process_set_id is not None:
            continue
        added = hvd.add_process_set(ranks)
        if rank in ranks:
            for count in (1, 50_000):
                summed = hvd.allreduce(torch.full((count,), rank), op=hvd.Sum, process_set=added)
                assert (summed == sum(ranks)).all()
            assert hvd.allgather_object(rank, process_set=added) == sorted(ranks)
    hvd.barrier()


def join_a_part(rank: int, size: int) -> None:
    """Join a world of the even or of the odd ranks; both find each other in the store of rank 0."""
    part = list(range(rank % 2, size, 2))
    hvd.init(comm=part)
    assert hvd.allgather(torch.tensor([rank])).tolist() == part
    hvd.barrier()
    hvd.shutdown()


def check_training() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(5, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    for parameter in model.parameters():
        everyone = hvd.allgather(parameter.detach().reshape(1, -1))
        assert all(torch.equal(everyone[0], other) for other in everyone)


@pytest.mark.parametrize(
    ("layout", "connections"),
    [
        ([0, 0, 1, 1], "1"),
        slow([0, 1, 0, 1], "2"),
        slow([0, 0, 1, 2], "1"),
        ([0, 1, 2], "3"),
    ],
    ids=str,
)
def test_layouts_of_ranks_on_hosts(hosts, layout, connections):
    env = {"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": PORT}
    env["TORCH_RING_CONNECTIONS"] = connections
    lines = run(
        check_everything,
        len(layout),
        initialized=False,
        transport="",
        env=env,
        namespaces=[hosts[host] for host in layout],
    )
    assert lines[0].startswith(f"{len(layout)} ranks")
    assert f"{namespaces.NETWORK}.1" in lines[0]
    assert ("shared memory" in lines[0]) == (len(set(layout)) < len(layout))
    assert lines[1:] == [""] * (len(layout) - 1)


def cut_the_last_rank_off(passed: Path) -> str:
    """Cut the link of the last rank while all ranks reduce."""
    tensor = torch.ones(1 << 18)
    hvd.allreduce(tensor)
    all_have_passed(passed, hvd.size())
    if hvd.rank() == hvd.size() - 1:
        pull = ("ip", "link", "set", "eth0", "down")
        threading.Timer(0.3, namespaces.run, pull).start()
    try:
        while True:
            hvd.allreduce(tensor)
    except hvd.PeerLostError as error:
        return str(error)


def test_a_cut_link_is_noticed(hosts, tmp_path):
    env = {
        "MASTER_ADDR": f"{namespaces.NETWORK}.1",
        "MASTER_PORT": PORT,
        "TORCH_RING_HEARTBEAT_TIMEOUT": "1.5",
    }
    try:
        errors = run(
            cut_the_last_rank_off,
            2,
            args=(tmp_path,),
            transport="",
            env=env,
            namespaces=[hosts[0], hosts[2]],
        )
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
    env = {"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": PORT}
    for _ in range(100 if full else 1):
        run(leave_while_packets_get_lost, 3, transport="", env=env, namespaces=hosts)


def leave_while_the_link_is_down() -> tuple[str, str]:
    """Leave on rank 0, whose link loses everything for a while; the others miss it."""
    tensor = torch.ones(3)
    hvd.allreduce(tensor)
    if hvd.rank() != 0:
        return error_of(lambda: hvd.allreduce(tensor, name="more"))
    namespaces.run("ip", "link", "set", "eth0", "down")
    threading.Timer(2.5, namespaces.run, ("ip", "link", "set", "eth0", "up")).start()
    hvd.shutdown()
    return "", ""


@pytest.mark.slow
def test_a_goodbye_survives_a_link_that_loses_it(hosts):
    """Heartbeats of the others come in between: they must not reset the connection."""
    env = {
        "MASTER_ADDR": f"{namespaces.NETWORK}.1",
        "MASTER_PORT": PORT,
        "TORCH_RING_HEARTBEAT_TIMEOUT": "8",
    }
    results = run(leave_while_the_link_is_down, 3, transport="", env=env, namespaces=hosts)
    for kind, text in results[1:]:
        assert kind == "PeerLostError"
        assert f"rank 0 ({namespaces.NETWORK}.1, pid " in text
        assert "has left: it called shutdown() or exited" in text, text
