"""Messages between two ranks: in dumps, report() and snapshot()."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
import torch.distributed as dist

import torch_ring as hvd
from tests.support.groups import on_ring
from tests.support.pool import error_of, eventually, run
from tests.support.slow import on_shm_and_slowly_on_tcp
from tests.support.worlds import on_both_transports
from tests.tracing.test_flight_recorder import analysed
from torch_ring import tracing
from torch_ring.tracing.counters import MessageCounts
from torch_ring.world import current

LONG = 100_000  # too long to be sent before there is a receive


def messages_of(folder: Path, rank: int) -> list[dict]:
    return pickle.loads((folder / f"flight_{rank}").read_bytes())["messages"]


def send_round(folder: Path) -> None:
    """Send a short and a long message to the next rank of three; the last receive stays open."""
    engine, rank = current.engine(), hvd.rank()
    ahead, behind = (rank + 1) % 3, (rank + 2) % 3
    long = torch.empty(LONG, dtype=torch.float64)
    receives = [engine.receive(torch.empty(4), behind, 5), engine.receive(long, None, 6)]
    sends = [engine.send(torch.ones(3), ahead, 5), engine.send(torch.ones_like(long), ahead, 6)]
    for each in (*receives, *sends):
        each.wait()
    open_one = engine.receive(torch.empty(2, dtype=torch.int16), None, 7)
    tracing.dump(folder)
    hvd.barrier()  # all have written their dumps before any rank goes on
    engine.send(torch.ones(1, dtype=torch.int16), ahead, 7).wait()
    open_one.wait()
    hvd.barrier()


@on_shm_and_slowly_on_tcp
def test_a_dump_has_the_messages(transport: str, tmp_path: Path) -> None:
    run(send_round, 3, transport=transport, args=(tmp_path,))
    for rank in range(3):
        found = messages_of(tmp_path, rank)
        ahead, behind = (rank + 1) % 3, (rank + 2) % 3
        assert [
            (each["number"], each["direction"], each["peer"], each["tag"], each["dtype"])
            for each in found
        ] == [
            (1, "receive", behind, 5, "float32"),
            (2, "receive", behind, 6, "float64"),
            (3, "send", ahead, 5, "float32"),
            (4, "send", ahead, 6, "float64"),
            (5, "receive", None, 7, "int16"),
        ]
        assert [each["bytes"] for each in found] == [12, 8 * LONG, 12, 8 * LONG, 4]
        assert [each["state"] for each in found] == 4 * ["finished"] + ["posted"]
        for each in (found[0], found[1], found[3]):
            assert each["time_posted_ns"] <= each["time_matched_ns"] <= each["time_finished_ns"]
        assert found[2]["time_matched_ns"] is None
        assert found[4]["time_matched_ns"] is found[4]["time_finished_ns"] is None
    text = analysed(tmp_path)  # they do not disturb torch's analyser
    assert "Not all ranks" not in text, text


def report_of_a_pending_receive() -> str:
    engine = current.engine()
    hvd.barrier()
    text = ""
    if hvd.rank() == 1:
        target = torch.empty(4)
        engine.receive(target, 0, 9).wait()
        hvd.barrier()
        return text

    def says_so() -> bool:
        nonlocal text
        text = tracing.report()[1].text or ""
        return text.startswith("in receive of ")

    assert eventually(says_so, 20.0), text
    engine.send(torch.ones(4), 1, 9).wait()
    hvd.barrier()
    return text


def test_report_tells_of_a_message_that_a_rank_waits_for() -> None:
    text = run(report_of_a_pending_receive, 2)[0]
    assert text.startswith("in receive of float32, 16 bytes, tag 9, from rank 0; "), text


def count_messages() -> dict[str, MessageCounts]:
    engine = current.engine()
    if hvd.rank() == 0:
        engine.send(torch.ones(5), 1).wait()
        engine.send(torch.ones(LONG), 1).wait()
        error = error_of(lambda: engine.send(torch.ones(LONG), 1, 1).wait())
        assert error[0] == "MismatchError"
    else:
        engine.receive(torch.ones(5), 0).wait()
        engine.receive(torch.ones(LONG), None).wait()
        too_short = torch.ones(5)
        error = error_of(lambda: engine.receive(too_short, 0, 1).wait())
        assert error[0] == "MismatchError"
    return tracing.snapshot().sets[0].messages


@on_both_transports
def test_the_snapshot_counts_messages(transport: str) -> None:
    sender, receiver = run(count_messages, 2, transport=transport)
    none = MessageCounts(0, 0, 0)
    some = MessageCounts(3, 1, 4 * (5 + LONG))
    assert sender == {"sent": some, "received": none}
    assert receiver == {"sent": none, "received": some}


def exchange_in_a_group(folder: str) -> None:
    rank = dist.get_rank()
    if rank == 2:
        dist.recv(torch.empty(3), src=1)
    elif rank == 1:
        dist.send(torch.ones(3), 2)
    tracing.dump(folder)
    (group,) = tracing.snapshot().groups.values()
    counts = group.messages
    assert counts["sent"].messages == (rank == 1)
    assert counts["received"].messages == (rank == 2)


def test_messages_of_torch_distributed(tmp_path: Path) -> None:
    on_ring(exchange_in_a_group, 3, str(tmp_path))
    assert messages_of(tmp_path, 0) == []
    (sent,), (received,) = messages_of(tmp_path, 1), messages_of(tmp_path, 2)
    assert (sent["direction"], sent["peer"], sent["bytes"]) == ("send", 2, 12)
    assert (received["direction"], received["peer"], received["bytes"]) == ("receive", 1, 12)
    assert sent["process_group"][1] == received["process_group"][1]
