# SPDX-License-Identifier: Apache-2.0
"""Failures of ranks: the place, the transport and who fails -> the error on each other rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from groups import on_ring
from pool import all_have_passed, error_of, eventually, has_asked, run
from process_set_use import check_process_set, sum_of_ranks
from slow import slow

import torch_ring as hvd
from torch_ring._C import arm_failpoints


def soon(number: int) -> None:
    """Send this process a signal while it communicates."""
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()


def leave() -> None:
    """Leave the world, and live a little longer."""
    hvd.shutdown()
    time.sleep(2)
    os._exit(0)


def leave_with_an_error() -> None:
    try:
        raise RuntimeError("disk full")
    finally:
        hvd.shutdown()


def die_after_the_goodbye() -> None:
    arm_failpoints(f"departed:{hvd.rank()}:kill")
    hvd.shutdown()


def leave_a_worker_behind() -> None:
    """A child lives on, which was forked as the workers of a loader are."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_collective() -> None:
    arm_failpoints(f"collective:{hvd.rank()}:2:kill")


FAILURES: dict[str, tuple[Callable[[], None], str]] = {
    "dies": (lambda: soon(signal.SIGKILL), ""),
    "dies in a collective": (die_in_a_collective, "died: its connection closed"),
    "is stopped": (lambda: soon(signal.SIGSTOP), ""),
    "leaves": (leave, "has left: it called shutdown() or exited"),
    "leaves with an error": (leave_with_an_error, "left: RuntimeError: disk full at test_failures"),
    "dies after its goodbye": (die_after_the_goodbye, "has left"),
    "leaves a worker behind": (leave_a_worker_behind, "died: its connection closed"),
}


def outlive(victim: int, how: str, passed: Path) -> tuple[str, str]:
    """Reduce until it fails, because the victim ends. Return the error."""
    tensor = torch.ones(1 << 20)
    sets = [hvd.add_process_set(ranks) for ranks in sets_of(victim)] if hvd.size() > 2 else []
    for each in sets:
        check_process_set(each, each.ranks or [])
    hvd.allreduce(tensor)
    all_have_passed(passed, hvd.size())
    if hvd.rank() == victim:
        FAILURES[how][0]()
    kind = "nothing"
    while kind == "nothing":
        kind, text = error_of(lambda: hvd.allreduce(tensor, name="doomed"))
    again, ended = error_of(lambda: hvd.allreduce(tensor, name="later"))
    assert again == kind
    assert ended.endswith(". Call shutdown() and init(), or exit"), ended
    for each in sets:
        lives = victim not in (each.ranks or [])
        if each.included():
            found, _ = error_of(lambda: sum_of_ranks(each))  # noqa: B023
            assert found == ("nothing" if lives else "PeerLostError"), each
    begin = time.monotonic()
    hvd.shutdown()
    assert time.monotonic() - begin < 5
    assert threading.active_count() == 1
    return kind, text


def sets_of(victim: int) -> list[list[int]]:
    """Return a set of the others, which lives as long as its members, and one with the victim."""
    others = [rank for rank in range(3) if rank != victim]
    return [others, sorted([others[0], victim])]


@pytest.mark.parametrize(
    ("how", "transport", "size", "victim"),
    [
        ("dies", "shm", 3, 2),
        ("dies", "tcp", 3, 0),
        ("dies", "tls", 3, 1),
        ("dies in a collective", "shm", 3, 1),
        ("is stopped", "shm", 2, 1),
        slow("is stopped", "tcp", 2, 1),
        ("leaves", "shm", 3, 2),
        ("leaves with an error", "shm", 2, 1),
        ("dies after its goodbye", "shm", 3, 1),
        ("leaves a worker behind", "shm", 2, 1),
        slow("leaves a worker behind", "tcp", 2, 1),
    ],
)
def test_a_lost_rank_is_named(how, transport, size, victim, tmp_path):
    env = {"TORCH_RING_TLS": "1"} if transport == "tls" else {}
    if how == "is stopped":
        # On a loaded machine, a late third rank could be given up in place of a stopped one.
        env["TORCH_RING_HEARTBEAT_TIMEOUT"] = "1.5"
    transport = "tcp" if transport == "tls" else transport
    args = victim, how, tmp_path
    results = run(outlive, size, args=args, transport=transport, env=env, may_die={victim})
    for rank in {*range(size)} - {victim}:
        kind, text = results[rank]
        assert kind == "PeerLostError", text
        assert f"rank {victim} (pid " in text, text
        assert FAILURES[how][1] in text, text
        # The second: it died between two of them.
        assert "allreduce 'doomed' float32" in text or "this world has ended" in text, text


@pytest.mark.parametrize(("end", "tls"), [("connecting", "1"), ("accepting", "0")])
def test_a_rank_that_dies_in_the_handshake_is_named(end, tls):
    """Long before init() gives up."""
    env = {
        "TORCH_RING_FAIL": f"handshake.{end}:1:1:kill",
        "TORCH_RING_INIT_TIMEOUT": "600",
        "TORCH_RING_TLS": tls,
    }
    call = [hvd.init]
    for outcome in run(
        *(error_of, 3), args=call, transport="tcp", env=env, initialized=False, may_die={1}
    )[::2]:
        assert outcome[0] == "PeerLostError", outcome
        assert "rank 1" in outcome[1], outcome


def wait_for_late_data() -> None:
    hvd.allreduce(torch.ones(100_000))
    # Rank 1 lives, and its data arrive later than a lost rank is given up.
    arm_failpoints("data.receive:1:late=1500" if hvd.rank() == 0 else "")
    sums = hvd.allreduce(torch.ones(100_000), op=hvd.Sum)
    arm_failpoints("")
    assert (sums == hvd.size()).all()


def test_a_live_rank_whose_data_are_late_is_waited_for_by_default():
    env = {"TORCH_RING_TIMEOUT": "0", "TORCH_RING_HEARTBEAT_TIMEOUT": "0.5"}
    run(wait_for_late_data, 2, transport="tcp", env=env)


def has_come_to_rest(pid: int) -> bool:
    """Return whether the main thread of a process sleeps, or has been stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith(("S", "T"))


def pass_a_barrier_late(waits: Path) -> str:
    """Return the error of a rank that wakes after another one has passed its barrier and died.

    Rank 1 waits in the barrier, and is stopped; rank 0 completes it, and dies; rank 2 continues
    rank 1.
    """
    pids = hvd.allgather_object(os.getpid())
    if hvd.rank() == 1:
        threading.Thread(target=lambda: eventually(has_asked) and waits.touch()).start()
    else:
        assert eventually(lambda: waits.exists() and has_come_to_rest(pids[1]))
    if hvd.rank() == 0:
        os.kill(pids[1], signal.SIGSTOP)
    error = error_of(hvd.barrier)[1]
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == 2:
        assert error_of(hvd.barrier)[0] == "PeerLostError"
        os.kill(pids[1], signal.SIGCONT)
    return error


def test_what_all_ranks_have_come_to_is_done_though_one_has_died_since(tmp_path):
    args = (tmp_path / "waits",)
    assert run(pass_a_barrier_late, 3, args=args, may_die={0})[1:] == ["", ""]


# --- a rank is stopped in the middle of a collective, and wakes up after the others gave up


def outlive_a_sleeper(wakes: Path) -> bool:
    """Reduce, which stops rank 1 before it writes its half; return whether rank 0 has kept its."""
    model = torch.nn.Linear(512, 512, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Sum
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 512)).sum().backward()

    for _ in range(3):
        step()
    shared = model.weight.grad
    assert shared is not None
    pids = hvd.allgather_object(os.getpid())
    hvd.barrier()
    if hvd.rank() == 1:
        arm_failpoints("shared.reduce:1:1:stop")
        error_of(step)
        arm_failpoints("")
        wakes.touch()
        return False
    kind, text = error_of(step)
    assert kind == "TimeoutError", text
    kept = shared.clone()
    # Rank 0 has written its half, in the memory where rank 1 will write the other.
    assert kept.unique().numel() == 2
    os.kill(pids[1], signal.SIGCONT)
    assert eventually(wakes.exists, 20.0)
    assert torch.equal(shared, kept)
    shared.fill_(3)  # the program goes on with it
    assert (shared == 3).all()
    return True


def test_a_woken_rank_does_not_write_to_gradients_that_others_keep(tmp_path):
    env = {"TORCH_RING_TIMEOUT": "4"}  # a slow start on a loaded machine does not count as late
    kept, _ = run(outlive_a_sleeper, 2, args=[tmp_path / "woken"], env=env, may_die={1})
    assert kept  # rank 1 may not have ended yet


# --- the network cuts connections between living ranks

WHY = ", although both ranks live: a firewall, NAT or another device of the network may have cut it"


def tcp_sockets() -> set[tuple[int, str]]:
    """Return this process's TCP connections: descriptors, which others get later, and names."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM:
                copy.getpeername()
                found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def reset_since(before: set[tuple[int, str]]) -> None:
    """Make the other ends' next calls fail with reset connections."""
    nowhere = bytes(16)  # a sockaddr of AF_UNSPEC disconnects
    cut = tcp_sockets() - before
    assert cut
    for fd, _ in cut:
        assert ctypes.CDLL(None).connect(fd, nowhere, len(nowhere)) == 0


def lose_all_connections(folder: Path) -> tuple[str, str]:
    """The network resets all connections of rank 1; return the error of the next collective."""
    before = tcp_sockets()
    hvd.init()
    hvd.allreduce(torch.ones(100_000))
    all_have_passed(folder / "joined", hvd.size())
    if hvd.rank() == 1:
        reset_since(before)
    all_have_passed(folder / "reset", hvd.size())
    error = error_of(lambda: hvd.allreduce(torch.ones(100_000)))
    all_have_passed(folder / "told", hvd.size())
    hvd.shutdown()
    return error


def test_connections_that_are_all_reset_are_no_death(tmp_path):
    errors = run(lose_all_connections, 3, args=[tmp_path], transport="tcp", initialized=False)
    for kind, text in errors:
        assert kind == "PeerLostError", text
        assert re.search(rf"connection to rank [0-2] .*{WHY}", text), text
        assert "died" not in text, text


def lose_the_connection_of_messages(folder: Path) -> tuple[str, str]:
    """The network resets no control connection: rank 0 gets the error while rank 1 lives."""
    rank = dist.get_rank()
    before = tcp_sockets()
    all_have_passed(folder / "looked", 2)
    dist.send(torch.zeros(1), 1) if rank == 0 else dist.recv(torch.zeros(1), 0)
    all_have_passed(folder / "used", 2)
    if rank == 1:
        reset_since(before)
    all_have_passed(folder / "reset", 2)
    error = error_of(lambda: dist.send(torch.zeros(1 << 20), 1)) if rank == 0 else ("", "")
    all_have_passed(folder / "told", 2)
    return error


def test_a_connection_of_messages_that_is_reset_is_told_while_the_other_rank_lives(tmp_path):
    (_, text), _ = on_ring(lose_the_connection_of_messages, 2, tmp_path, transport="tcp")
    assert re.search(r"connection to rank 1 .*(reset by peer|Broken pipe)", text), text
    assert WHY in text, text
