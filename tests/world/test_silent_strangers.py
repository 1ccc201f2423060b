"""init() while strangers connect to every socket of the ranks, and say nothing."""

import os
import re
import resource
import signal
import socket
import time
from pathlib import Path

import namespaces
import pytest
import torch
from pool import run

import torch_ring as hvd

PORT = "29511"

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def listeners(store: bool) -> list[tuple[int, object]]:
    """Return family and address of all listening sockets of this namespace."""
    unix = re.findall(r" 00010000 0001 .* @(torch_ring/\w+)", Path("/proc/net/unix").read_text())
    found: list[tuple[int, object]] = [(socket.AF_UNIX, f"\0{name}") for name in unix]
    tcp = Path("/proc/net/tcp").read_text()
    for address, port in re.findall(r": (\w{8}):(\w{4}) 00000000:0000 0A", tcp):
        host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
        if store or int(port, 16) != int(PORT):
            found.append((socket.AF_INET, (host, int(port, 16))))
    return found


def besiege(count: int, store: bool) -> int:
    """Start a process that makes `count` connections to each of those sockets; return its pid.

    With `ulimit -n 128` it spares the job's store: torch's server has no limit.
    """
    child = os.fork()
    if child:
        return child
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made: dict[tuple[int, object], list[socket.socket]] = {}
    while os.getppid() != 1:
        for family, address in listeners(store):
            strangers = made.setdefault((family, address), [])
            while len(strangers) < count:
                stranger = socket.socket(family)
                stranger.setblocking(False)
                strangers.append(stranger)
                if stranger.connect_ex(address) not in (0, 115):  # EINPROGRESS
                    break
        time.sleep(0.01)
    os._exit(0)


def init_besieged(layout: list[int], count: int, limit: int) -> float:
    rank = int(os.environ["RANK"])
    first_here = layout.index(layout[rank]) == rank
    child = besiege(count, store=limit == 0) if first_here else 0
    if limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        began = time.monotonic()
        hvd.init()
        seconds = time.monotonic() - began
        assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum).eq(hvd.size()).all()
        # While the job runs and needs more connections, dropped strangers come back.
        size = hvd.size()
        for ranks in ([0, size - 1], [1, size - 1], [0, 1]) if size > 2 else ():
            added = hvd.add_process_set(ranks)
            if added.included():
                ones = torch.ones(100_000)
                assert hvd.allreduce(ones, op=hvd.Sum, process_set=added).eq(2).all()
        hvd.barrier()
        hvd.shutdown()
    finally:
        if first_here:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "count", "limit"), [([0, 0, 1], 1500, 0), ([0, 0, 1], 250, 128)]
)
def test_silent_strangers(hosts, layout, count, limit, full):
    """There are 1500 strangers at each socket; with --full 4000, if `ulimit -n` allows it."""
    if full and not limit:
        # Unix and TCP sockets of up to two ranks, the store, and a process's other descriptors.
        count = min(4000, (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 200) // 5)
    seconds = run(
        init_besieged,
        len(layout),
        args=(layout, count, limit),
        transport="",
        initialized=False,
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": PORT},
        namespaces=[hosts[host] for host in layout],
    )
    assert max(seconds) < 15
