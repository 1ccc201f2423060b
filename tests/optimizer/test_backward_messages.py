"""Names and bytes at the end of a backward pass: the same in C++ and in Python."""

from __future__ import annotations

import struct

import pytest
import torch
from pool import run
from torch.optim import SGD
from training import grads, weights

import torch_ring as hvd
from torch_ring._C import GradientReport, NotFinite, PassReport, Worst

ALIGNED = 16  # float32 elements between the beginnings of two neighbouring gradients


def train_with_a_peer_by_hand(ending: str) -> None:
    """Rank 1 sends the messages of a pass of two parameters by hand: literal names and bytes."""
    a, b = parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=hvd.Sum)
    for _ in range(2):  # with digests of weights
        (a * 2 + b * 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ending == "python":
        optimizer._reducer.plain = None
    if hvd.rank() == 0:
        (a * 2 + b * 4).backward()
        assert grads(parameters) == [2 + 300, 4 + 50]
        return
    engine = hvd.world.current.engine()
    steps, reports, optimizer_index, due = 2, 1, 0, b"\x03"
    body = struct.pack("<I?III", optimizer_index, False, len(due), 0, 0) + due
    report = struct.pack("<IQII?", 21 + len(body), steps, 0, reports, False) + body
    own = torch.frombuffer(bytearray(report), dtype=torch.uint8)
    gathered = engine.submit("allgather", own, None, "backward.2", True, joinable=True).wait()
    assert bytes(gathered.numpy()) == 2 * report
    bucket = torch.zeros(ALIGNED + 1)  # b's gradient was ready first
    bucket[0], bucket[ALIGNED] = 50, 300
    name = "gradients.0.2.0.0"
    engine.submit("allreduce", bucket, bucket, name, True, hvd.Sum).wait()
    assert bucket[[0, ALIGNED]].tolist() == [4 + 50, 2 + 300]


@pytest.mark.parametrize("ending", ["c++", "python"])
def test_messages_of_a_pass_are_these(ending):
    run(train_with_a_peer_by_hand, 2, args=(ending,))


def test_bytes_of_a_report():
    """The first report of an optimizer has the order of readiness, and a digest of the weights."""
    digest = bytes(range(8))
    first = GradientReport(2, 0b101, sparse=0b100, accumulating=True, order=(2, 0), digest=digest)
    later = GradientReport(3, 0b1)
    accumulating, has_digest = 1, 2
    body = struct.pack("<IBIII", 2, accumulating | has_digest, 1, 1, 2)
    body += b"\x05" + b"\x04" + struct.pack("<II", 2, 0) + digest
    body += struct.pack("<IBIII", 3, 0, 1, 0, 0) + b"\x01"
    found = (NotFinite(0, 5, Worst.nan, True), NotFinite(8, 5, Worst.infinite, False))
    spoilt = GradientReport(4, 0b1_0000_0001, not_finite=found)
    not_finite = 64
    body += struct.pack("<IBIII", 4, not_finite, 2, 0, 0) + b"\x01\x01"
    body += struct.pack("<IIIB?IIB?", 2, 0, 5, 3, True, 8, 5, 2, False)
    encoded = struct.pack("<IQII?", 21 + len(body), 7, 9, 3, True) + body
    report = PassReport(7, (first, later, spoilt), gave_up=True, plan=9)
    assert report.encode() == encoded
    other = PassReport(8)
    assert PassReport.decode_all(encoded + other.encode() + encoded) == [report, other, report]
    longer = struct.pack("<I", len(encoded) + 1) + encoded[4:] + b"\0"
    for other_bytes in (longer, *(encoded[:size] for size in range(1, len(encoded)))):
        with pytest.raises(hvd.RingError, match="other bytes than its parts"):
            PassReport.decode_all(other_bytes)
