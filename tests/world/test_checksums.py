"""TORCH_RING_CHECKSUM: data between hosts carry checksums, and arrive unchanged or not at all.

tests/cpp/checked_stream_test.cc flips every bit of a stream.
"""

import os
import socket
import stat

import pytest
import torch
import torch.distributed as dist
from groups import on_ring
from pool import error_of, run

import torch_ring as hvd
from torch_ring._C import arm_failpoints

COUNT = 1 << 21  # of float32: megabytes for each rank
HEADER_BYTES = 12  # of a frame: csrc/transport/checked_stream.h
RECEIVED_AT = 128  # of tcpi_bytes_received in the kernel's struct tcp_info
LEAST_BYTES = 256 << 10  # data connections have received more, control connections less


def data_bytes_received() -> int:
    """Return the bytes received on this process's TCP data connections."""
    received = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:  # the descriptor of the listing itself
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


def test_results_with_checksums():
    size, env = 3, {"TORCH_RING_CONNECTIONS": "2"}
    plain = run(reduce_and_count, size, transport="tcp", env=env)
    checked = run(reduce_and_count, size, transport="tcp", env=env | {"TORCH_RING_CHECKSUM": "1"})
    for without, with_checksums in zip(plain, checked, strict=True):
        assert without > COUNT
        frames = without // (256 << 10)  # at least: none is longer
        assert with_checksums - without >= HEADER_BYTES * frames


# --- a flipped bit

DAMAGED = "arrived damaged: their checksum is not that of the bytes sent (TORCH_RING_CHECKSUM)"


def flip(nth: int) -> None:
    """Flip a bit in the `nth` data that rank 1 receives from rank 0 from now on."""
    arm_failpoints(f"data.received:0:{nth}:close")


def reduce_damaged_data(nth: int) -> tuple[str, str]:
    ones = torch.ones(COUNT)
    hvd.allreduce(ones, name="first")
    if hvd.rank() == 1:
        flip(nth)
    outcome = error_of(lambda: hvd.allreduce(ones, op=hvd.Sum, name="damaged"))
    arm_failpoints("")
    return outcome


@pytest.mark.parametrize(("size", "nth"), [(2, 1), (3, 20)], ids=["the agreement", "the data"])
def test_a_flipped_bit_is_an_error_on_all_ranks(size, nth):
    env = {"TORCH_RING_CHECKSUM": "1"}
    for kind, text in run(reduce_damaged_data, size, args=[nth], transport="tcp", env=env):
        assert kind in ("RingError", "PeerLostError"), text
        assert "allreduce 'damaged'" in text, text
        assert DAMAGED in text, text


def send_a_damaged_message(count: int) -> tuple[str, str]:
    rank = dist.get_rank()
    if rank == 1:
        flip(1)
    values = torch.ones(count)
    outcome = error_of(lambda: dist.send(values, 1) if rank == 0 else dist.recv(values, 0))
    if rank == 0 and outcome[0] == "nothing":  # a short message counts as sent once it has left
        outcome = error_of(lambda: dist.recv(values, 1))
    arm_failpoints("")
    return outcome


@pytest.mark.parametrize("count", [100, COUNT])
def test_a_flipped_bit_of_a_message_is_an_error_on_both_ranks(count):
    env = {"TORCH_RING_CHECKSUM": "1"}
    for kind, text in on_ring(send_a_damaged_message, 2, count, transport="tcp", env=env):
        assert kind != "nothing"
        assert DAMAGED in text, text
