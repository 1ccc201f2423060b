# SPDX-License-Identifier: Apache-2.0
"""TORCH_RING_CHECKSUM: damaged data between hosts are an error on all ranks.

tests/cpp/checked_stream_test.cc flips every bit of a stream, and tests/cpp/communicator_test.cc has
the results of collectives with checksums.
"""

import torch
import torch.distributed as dist
from groups import on_ring
from on_ranks import on_ranks
from pool import error_of

import torch_ring as hvd
from torch_ring._C import arm_failpoints

CHECKED = {"TORCH_RING_CHECKSUM": "1"}
COUNT = 1 << 21  # of float32: megabytes for each rank
DAMAGED = "arrived damaged: their checksum is not that of the bytes sent (TORCH_RING_CHECKSUM)"


def flip(nth: int) -> None:
    """Flip a bit in the `nth` data that rank 1 receives from rank 0 from now on."""
    arm_failpoints(f"data.received:0:{nth}:close")


@on_ranks(3, transport="tcp", env=CHECKED)
def test_a_flipped_bit_is_an_error_on_all_ranks() -> None:
    ones = torch.ones(COUNT)
    hvd.allreduce(ones, name="first")
    if hvd.rank() == 1:
        flip(20)
    kind, text = error_of(lambda: hvd.allreduce(ones, op=hvd.Sum, name="damaged"))
    arm_failpoints("")
    assert kind in ("RingError", "PeerLostError"), text
    assert "allreduce 'damaged'" in text, text
    assert DAMAGED in text, text


def send_a_damaged_message() -> tuple[str, str]:
    rank = dist.get_rank()
    if rank == 1:
        flip(1)
    values = torch.ones(COUNT)
    outcome = error_of(lambda: dist.send(values, 1) if rank == 0 else dist.recv(values, 0))
    arm_failpoints("")
    return outcome


def test_a_flipped_bit_of_a_message_is_an_error_on_both_ranks():
    for kind, text in on_ring(send_a_damaged_message, 2, transport="tcp", env=CHECKED):
        assert kind != "nothing"
        assert DAMAGED in text, text
