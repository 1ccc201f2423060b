# SPDX-License-Identifier: Apache-2.0
"""All ranks agree on a stop, whichever of them got the signal, and wherever they are.

tests/cpp/control_plane_test.cc has ranks that have passed different numbers of points, and several
signals; tests/run/test_run_elastic.py has the stop of an elastic job.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, expect_error, run

import torch_ring as hvd
from torch_ring.world import current, preemption


@contextlib.contextmanager
def watching(*signals: str) -> Iterator[None]:
    """Watch signals, only until the end of this test."""
    preemption.watch(signals)
    try:
        yield
    finally:
        preemption.watch(())


def steps_until_stop(signalled: dict[int, int], together: bool) -> tuple[int, str]:
    """Call requested() until it is True; return the number of calls, and the reason.

    Args:
        signalled: by rank, the step in which it gets a signal.
        together: whether the ranks wait for one another in each step, as in training.
    """
    mine = signalled.get(hvd.rank())
    with watching("SIGTERM"):
        for step in itertools.count(1):
            if together:
                hvd.allreduce(torch.ones(3), name="gradient")
            if step == mine:
                os.kill(os.getpid(), signal.SIGTERM)
            if preemption.requested():
                assert preemption.requested()  # and stays so
                return step, preemption.reason()
    raise AssertionError("nobody stopped")


@pytest.mark.parametrize(
    ("size", "transport", "together"),
    [(1, "shm", False), (4, "shm", False), (3, "tcp", True)],
)
def test_all_ranks_stop_at_the_same_step(size, transport, together):
    last = size - 1
    results = run(steps_until_stop, size, args=({last: 20}, together), transport=transport)
    steps, reasons = zip(*results, strict=True)
    assert set(steps) == {steps[0]}
    assert steps[0] >= 20
    assert all(f"rank {last} (pid " in reason for reason in reasons), reasons
    assert all(reason.endswith(") got SIGTERM") for reason in reasons), reasons


def signal_before_init() -> list[int]:
    found = []
    with watching("SIGUSR1"):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(2):  # also in the next world: the process must stop
            hvd.init()
            step = 0
            while not preemption.requested():
                step += 1
            found.append(step)
            hvd.shutdown()
    return found


def test_a_signal_that_came_before_the_world():
    (first, *others) = run(signal_before_init, 3, initialized=False)
    assert others == [first] * 2


def fork_processes() -> None:
    context = multiprocessing.get_context("fork")
    asleep = context.Process(target=time.sleep, args=(100,))
    asleep.start()
    asleep.terminate()  # ends it: the handlers are the parent's alone
    asleep.join()
    assert asleep.exitcode == -signal.SIGTERM


def loader_of(workers: int, **more: Any) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(64)),
        num_workers=workers,
        worker_init_fn=preemption.shield_worker,
        multiprocessing_context="fork",
        **more,
    )


def load_through_signals() -> None:
    seen = 0
    for seen, _ in enumerate(loader_of(2), 1):
        if seen == 8:  # both workers have begun
            for worker in multiprocessing.active_children():
                for number in (signal.SIGTERM, signal.SIGUSR2):
                    # As a launcher does to all processes of a rank; it is not their parent.
                    subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)
    assert seen == 64


def leave_workers() -> None:
    """A loop ends, and so does the program, while workers live: they end with it."""
    batches = iter(loader_of(2, persistent_workers=True))
    for _ in range(2):  # one of each worker: both have begun
        next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        worker.terminate()  # as multiprocessing does at the end of a program
    for worker in workers:
        worker.join(30)
    assert [worker.is_alive() for worker in workers] == [False, False]


@on_ranks(1)
def test_processes_that_are_forked() -> None:
    with watching("SIGTERM", "SIGUSR2"):
        fork_processes()
        load_through_signals()
        leave_workers()


def require_ignored() -> None:
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def check_arguments() -> None:
    wrong = "InvalidArgumentError"
    expect_error(wrong, "no signal 'SIGNONE'", lambda: preemption.watch(["SIGNONE"]))
    expect_error(wrong, "cannot handle SIGKILL", lambda: preemption.watch([signal.SIGKILL]))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(expect_error, wrong, "by the main thread", preemption.watch).result()

    before = signal.getsignal(signal.SIGUSR1)
    preemption.watch(["SIGUSR1", signal.SIGTERM])
    preemption.watch(["SIGTERM"])
    assert signal.getsignal(signal.SIGUSR1) is before
    assert (preemption.requested(), preemption.reason()) == (False, "")
    preemption.watch(())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    for ends in (lambda: preemption.watch(()), check_a_forked_process):
        preemption.watch(["SIGUSR1"])
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the program's own: it stays
        ends()
        require_ignored()
    preemption.watch(())
    signal.signal(signal.SIGUSR1, before)


def check_a_forked_process() -> None:
    forked = multiprocessing.get_context("fork").Process(target=require_ignored)
    forked.start()
    forked.join()
    assert forked.exitcode == 0


def test_arguments():
    run(check_arguments, 1)
    assert error_of(preemption.requested)[0] == "NotInitializedError"


def wait_for_a_silent_rank(limit_s: float) -> tuple[str, str]:
    """Rank 1 is stopped when rank 0 gets its signal."""
    object.__setattr__(current.world().config, "init_timeout_s", limit_s)
    pids = hvd.allgather_object(os.getpid())
    if hvd.rank() == 1:
        signal.pause()
    os.kill(pids[1], signal.SIGSTOP)
    stat = Path(f"/proc/{pids[1]}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    try:
        with watching("SIGTERM"):
            os.kill(pids[0], signal.SIGTERM)
            return error_of(preemption.requested)
    finally:
        os.kill(pids[1], signal.SIGKILL)


@pytest.mark.parametrize(
    ("heartbeat_s", "limit_s", "kind", "reason"),
    [
        (1, 60.0, "PeerLostError", "was lost while the ranks agreed where to stop"),
        (60, 1.0, "TimeoutError", "have not agreed within 1 s"),
    ],
)
def test_a_rank_that_is_stopped_does_not_hold_the_others_for_ever(
    heartbeat_s, limit_s, kind, reason
):
    heartbeat = {"TORCH_RING_HEARTBEAT_TIMEOUT": str(heartbeat_s)}
    outcomes = run(wait_for_a_silent_rank, 2, args=(limit_s,), env=heartbeat, may_die=(1,))
    assert outcomes[0][0] == kind
    assert reason in outcomes[0][1]
