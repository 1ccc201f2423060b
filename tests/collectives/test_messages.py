# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks of a process set: Engine.send and Engine.receive."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from pool import all_have_passed, error_of, eventually, run
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.world import current
from torch_ring.world.process_set import engine_of

on_two_and_three = pytest.mark.parametrize(
    ("transport", "size"), [("shm", 2), ("shm", 3), ("tcp", 2), ("tcp", 3)]
)
# Sizes around the limit of messages that do not wait for their receiver, and a long one.
SIZES = [0, 1, 16383, 16384, 16385, 5_000_000]


def numbered(count: int, what: int) -> torch.Tensor:
    """Return a unique message."""
    return (torch.arange(count, dtype=torch.int64) * 31 + what).to(torch.uint8)


def send_all_ways() -> None:
    engine = current.engine()
    rank, size = hvd.rank(), hvd.size()
    peers = [peer for peer in range(size) if peer != rank]
    for count in SIZES:
        received = {peer: torch.zeros(count, dtype=torch.uint8) for peer in peers}
        receives = {peer: engine.receive(received[peer], peer, 7) for peer in peers}
        sent = {peer: numbered(count, 10 * rank + peer) for peer in peers}
        sends = {peer: engine.send(sent[peer], peer, 7) for peer in peers}
        for peer in peers:
            assert receives[peer].wait() == peer
            assert sends[peer].wait() == peer
            assert sends[peer].done()
            assert torch.equal(received[peer], numbered(count, 10 * peer + rank))
        hvd.barrier()  # collectives run at the same time


@on_two_and_three
def test_every_size(transport, size):
    run(send_all_ways, size, transport=transport)


def send_strided() -> None:
    engine = current.engine()
    base = torch.arange(60.0).reshape(6, 10)
    if hvd.rank() == 0:
        engine.send(base.t()[::2], 1, 1).wait()
        engine.send(torch.complex(base, base).conj(), 1, 2).wait()
        engine.send(base[0, :3], 1, 3).wait()
        return
    into = torch.zeros(6, 10)
    version = into._version
    engine.receive(into.t()[::2], 0, 1).wait()
    assert into._version > version
    assert torch.equal(into[:, ::2], base[:, ::2])
    assert not into[:, 1::2].any()
    numbers = torch.zeros(6, 10, dtype=torch.complex64)
    engine.receive(numbers, 0, 2).wait()
    assert torch.equal(numbers, torch.complex(base, -base))
    longer = torch.full((5, 2), 9.0)[:, 0]  # strided, and longer than the message
    engine.receive(longer, 0, 3).wait()
    assert longer.tolist() == [0.0, 1.0, 2.0, 9.0, 9.0]


def test_tensors_that_are_not_contiguous():
    run(send_strided, 2)


def receive_from_any(each: int) -> None:
    engine = current.engine()
    if hvd.rank() != 1:
        for i in range(each):
            engine.send(numbered(20_000 * (i % 2) + 5, 100 * hvd.rank() + i), 1, 3).wait()
        return
    seen = dict.fromkeys(set(range(hvd.size())) - {1}, 0)
    for _ in range(each * len(seen)):
        into = torch.zeros(20_005, dtype=torch.uint8)
        source = engine.receive(into, None, 3).wait()
        i, seen[source] = seen[source], seen[source] + 1
        count = 20_000 * (i % 2) + 5
        assert torch.equal(into[:count], numbered(count, 100 * source + i))
    assert set(seen.values()) == {each}


@on_two_and_three
def test_from_any_rank(transport, size):
    run(receive_from_any, size, args=(20,), transport=transport)


def use_a_set() -> None:
    members = [2, 0]
    process_set = hvd.add_process_set(members)
    if hvd.rank() == 1:
        return
    engine = engine_of(process_set)
    world = current.engine()
    ranks = sorted(members)
    mine = ranks.index(hvd.rank())
    in_set, in_world = torch.zeros(4), torch.zeros(4)
    works = [
        engine.receive(in_set, 1 - mine),
        world.receive(in_world, ranks[1 - mine]),
        world.send(torch.full((4,), 2.0), ranks[1 - mine]),
        engine.send(torch.full((4,), 1.0), 1 - mine),
    ]
    for work in works:
        work.wait()
    assert in_set.tolist() == [1.0] * 4
    assert in_world.tolist() == [2.0] * 4
    with pytest.raises(hvd.InvalidArgumentError, match="the set has 2"):
        engine.send(torch.zeros(1), 2)


@on_both_transports
def test_sets_have_messages_of_their_own(transport):
    run(use_a_set, 3, transport=transport)


def mismatch(count: int) -> tuple[str, str]:
    engine = current.engine()
    if hvd.rank() == 0:
        kind, text = error_of(lambda: engine.send(torch.zeros(count), 1, 5).wait())
    else:
        doubles = torch.zeros(count, dtype=torch.float64)
        kind, text = error_of(lambda: engine.receive(doubles, 0, 5).wait())
    # The messages after it arrive.
    again = torch.full((3,), float(hvd.rank()))
    if hvd.rank() == 0:
        engine.send(again, 1, 5).wait()
    else:
        engine.receive(again, 0, 5).wait()
    assert again.tolist() == [0.0] * 3
    return kind, text


def test_another_dtype_is_an_error():
    for kind, text in run(mismatch, 2, args=(5000,)):  # on both ranks
        assert kind == "MismatchError"
        assert "receives at most float64, 40000 bytes, tag 5; rank 0 (" in text
        assert "sends float32, 20000 bytes, tag 5" in text
    (sender, _), (receiver, text) = run(mismatch, 2, args=(5,))  # of a short one the receiver hears
    assert (sender, receiver) == ("nothing", "MismatchError")
    assert "receives at most float64, 40 bytes, tag 5" in text


def call_wrongly() -> None:
    engine = current.engine()
    for peer in (-1, 2, hvd.rank()):
        with pytest.raises(hvd.InvalidArgumentError, match="rank"):
            engine.send(torch.zeros(1), peer)
        with pytest.raises(hvd.InvalidArgumentError, match="rank"):
            engine.receive(torch.zeros(1), peer)
    with pytest.raises(hvd.InvalidArgumentError, match="expanded tensor"):
        engine.receive(torch.zeros(1).expand(3), 1 - hvd.rank())
    with pytest.raises(hvd.InvalidArgumentError, match="not dense"):
        engine.send(torch.eye(3).to_sparse(), 1 - hvd.rank())
    with pytest.raises(hvd.InvalidArgumentError, match="on the CPU"):
        engine.send(torch.zeros(1, device="meta"), 1 - hvd.rank())


def test_wrong_calls():
    run(call_wrongly, 2)


def call_alone() -> None:
    with pytest.raises(hvd.InvalidArgumentError, match="another rank"):
        current.engine().send(torch.zeros(1), 0)


def test_a_world_of_one_has_no_messages():
    run(call_alone, 1)


def lose_a_rank(victim: int, how: str, passed: Path) -> tuple[str, str]:
    engine = current.engine()
    hvd.barrier()
    all_have_passed(passed, hvd.size())
    if hvd.rank() == victim:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.shutdown()
        return "", ""
    kind, text = error_of(lambda: engine.receive(torch.zeros(9), victim).wait())
    assert kind == error_of(lambda: engine.send(torch.zeros(5000), victim).wait())[0]
    hvd.shutdown()
    assert threading.active_count() == 1
    return kind, text


@on_both_transports
@pytest.mark.parametrize("how", ["kill", "leave"])
def test_a_lost_rank_is_named(how, transport, tmp_path):
    size, victim = 3, 2
    results = run(
        lose_a_rank, size, args=(victim, how, tmp_path), transport=transport, may_die={victim}
    )
    for kind, text in results[:-1]:
        assert kind == "PeerLostError"
        assert f"rank {size - 1} (pid " in text


def shut_down() -> tuple[str, str]:
    engine, other = current.engine(), 1 - hvd.rank()
    work = engine.receive(torch.zeros(9), other)
    hvd.barrier()
    hvd.shutdown()
    assert work.done()
    kind, text = error_of(lambda: engine.send(torch.zeros(9), other))
    assert kind == "RingError"
    assert "torch_ring was shut down" in text
    return error_of(work.wait)


def test_shutdown_ends_what_is_outstanding():
    for kind, text in run(shut_down, 2):
        assert kind in ("RingError", "PeerLostError")  # after this rank's shutdown, or the other's
        assert "shut down" in text or "has left" in text


def wait_too_long() -> tuple[str, str]:
    engine = current.engine()
    if hvd.rank() == 1:
        # The error of the other rank ends the set here, too.
        return error_of(lambda: engine.receive(torch.zeros(9), 0, 2).wait())
    return error_of(lambda: engine.receive(torch.zeros(9), 1, 1).wait())


def test_a_late_rank_is_an_error():
    for kind, text in run(wait_too_long, 2, env={"TORCH_RING_TIMEOUT": "1"}):
        assert kind == "TimeoutError"
        assert "receive of float32, 36 bytes, tag" in text
        assert "the other rank is late (TORCH_RING_TIMEOUT)" in text


def keep_no_tensor() -> None:
    engine = current.engine()
    tensor = torch.zeros(100_000)
    storage = tensor.untyped_storage()
    alive = storage._weak_ref()
    work = engine.send(tensor, 1) if hvd.rank() == 0 else engine.receive(tensor, 0)
    work.wait()
    del tensor, storage
    assert eventually(lambda: torch.UntypedStorage._expired(alive))
    torch.UntypedStorage._free_weak_ref(alive)


def test_a_message_that_is_done_keeps_no_tensor():
    run(keep_no_tensor, 2)
