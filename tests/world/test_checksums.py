"""TORCH_RING_CHECKSUM: the data between hosts carry checksums, and arrive as they were.

tests/cpp/checked_stream_test.cc flips bits.
"""

import os
import socket
import stat

import pytest
import torch
from pool import run

import torch_ring as hvd

COUNT = 1 << 21  # of float32: megabytes for each rank
HEADER_BYTES = 12  # of a frame: csrc/transport/checked_stream.h
RECEIVED_AT = 128  # of tcpi_bytes_received in the kernel's struct tcp_info
LEAST_BYTES = 256 << 10  # that a data connection has received, and no control connection


def data_bytes_received() -> int:
    """Return what the TCP connections of this process that carry data have received."""
    received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:  # that of the listing itself
            continue
        if not is_socket:
            continue
        with socket.socket(fileno=os.dup(int(name))) as each:
            if each.family == socket.AF_INET and each.type == socket.SOCK_STREAM:
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_AT + 8)
                count = int.from_bytes(info[RECEIVED_AT:], "little")
                received += count if count >= LEAST_BYTES else 0
    return received


def reduce_and_count() -> int:
    rank, size = hvd.rank(), hvd.size()
    for count in (1, 1000, 20_000, COUNT):
        mine = (torch.arange(count) % 7 + rank).float()
        want = (torch.arange(count) % 7 * size + size * (size - 1) // 2).float()
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), want)
        everyones = hvd.allgather(mine.view(1, -1))
        assert all(torch.equal(row, mine - rank + peer) for peer, row in enumerate(everyones))
    return data_bytes_received()


@pytest.mark.parametrize(("size", "connections"), [(2, 1), (3, 2)])
def test_results_with_checksums(size, connections):
    env = {"TORCH_RING_CONNECTIONS": str(connections)}
    plain = run(reduce_and_count, size, transport="tcp", env=env)
    checked = run(reduce_and_count, size, transport="tcp", env=env | {"TORCH_RING_CHECKSUM": "1"})
    for without, with_checksums in zip(plain, checked, strict=True):
        assert without > COUNT
        frames = without // (256 << 10)  # at least: none is longer
        assert with_checksums - without >= HEADER_BYTES * frames
