"""LIBRARIES: functions by which a forked rank joins a world with each library."""

from __future__ import annotations

import encodings.idna  # noqa: F401  socket.getaddrinfo() imports it; here once for all ranks
import itertools
import os
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from hosts import variables
from namespaces import Host
from start_line import COUNT, Line, sum_at_start

import torch_ring as hvd

HERE = Host("", ("127.0.0.1",))  # no namespace: the ranks stay where the program is
PORTS = range(20_000, 32_000)  # below those that the kernel gives to outgoing connections
PROGRAM_S = 15.0  # the program gives a world up so much later than the library

_worlds = itertools.count()


def environment(
    hosts: Sequence[Host], size: int, timeout_s: float
) -> Callable[[int], Mapping[str, str]]:
    """Return a function that returns a rank's variables in a new world, as torchrun sets them."""
    number = next(_worlds)
    common = {
        "MASTER_PORT": str(free_port(number)),
        "TORCHELASTIC_RUN_ID": f"init_scale-{os.getpid()}-{number}",
        "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo",
        "TORCH_RING_INIT_TIMEOUT": str(timeout_s),
        "TORCH_RING_TIMEOUT": str(timeout_s),
        "TORCH_RING_LOG_LEVEL": "error",
    }
    places = hosts or [HERE]
    return lambda rank: variables(places, size // len(places), rank) | common


def free_port(number: int) -> int:
    """Return a free port for rank 0's store, different for each world."""
    for i in range(len(PORTS)):
        port = PORTS[(os.getpid() * 100 + number + i) % len(PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


def by_torch_ring(line: Line, _timeout_s: float) -> None:
    """Run as a rank of torch_ring; the timeout is in the environment."""

    def start() -> Callable[[], Sequence[float]]:
        hvd.init()
        total = hvd.allreduce_(torch.full((COUNT,), float(line.rank)), op=hvd.Sum)
        return total.tolist

    sum_at_start(line, start, hvd.shutdown)


def by_gloo(line: Line, timeout_s: float) -> None:
    """Run as a rank of torch.distributed over gloo, which needs a descriptor for every rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def start() -> Callable[[], Sequence[float]]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        total = torch.full((COUNT,), float(line.rank))
        dist.all_reduce(total)
        return total.tolist

    sum_at_start(line, start, dist.destroy_process_group)


LIBRARIES: dict[str, Callable[[Line, float], None]] = {
    "torch_ring": by_torch_ring,
    "gloo": by_gloo,
}
