# SPDX-License-Identifier: Apache-2.0
"""SIGTERM to ranks of an elastic job: they leave at one step, and the others go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

import pool
import pytest
from on_ranks import on_ranks

import torch_ring as hvd
from torch_ring.elastic.drain import Drain
from torch_ring.elastic.regroup import Limits, leavers_of
from torch_ring.world import preemption

STEPS = 12
ENDED = 128 + signal.SIGTERM

Trained = tuple[int, list[int], list[int]]


def train_while_ranks_go(
    signals: Mapping[int, signal.Signals], commits: bool, least: int
) -> Trained:
    """Return the exit code, the steps, and the number of ranks in each.

    Args:
        signals: by rank, the signals that it gets in step 5.
        commits: whether each step ends with commit(), and not with check_host_updates().
        least: the ranks go on until so few of them have done a step.
    """
    name = hvd.rank()
    state = hvd.elastic.ObjectState(step=0)
    steps, sizes = [], []

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        while state.step < STEPS or sizes[-1:] != [least]:
            if state.step == 5 and name in signals and len(steps) == 5:
                os.kill(os.getpid(), signals[name])
            hvd.barrier()
            steps.append(state.step)
            sizes.append(hvd.size())
            state.step += 1
            if commits:
                state.commit()
            else:
                state.check_host_updates()

    try:
        train(state)
    except SystemExit as end:
        return int(end.code or 0), steps, sizes
    return 0, steps, sizes


def require_in_peace(gone: Trained, stayed: Trained) -> int:
    """Return the number of steps of a rank that left; it took each one with the others."""
    (code, steps, sizes), (_, all_steps, all_sizes) = gone, stayed
    assert code == ENDED
    assert len(steps) > 5  # the step of the signal was done
    assert (steps, sizes) == (all_steps[: len(steps)], all_sizes[: len(steps)])
    assert all_sizes[len(steps)] < sizes[-1]
    return len(steps)


@pytest.mark.parametrize(
    ("size", "leaves", "dies", "commits"),
    [
        (4, [0], [], True),
        (4, [1, 2, 3], [], True),
        (3, [1], [], False),
        (4, [1], [0], True),  # rank 0 tells the others
    ],
)
def test_ranks_leave_at_a_step(size, leaves, dies, commits):
    signals = dict.fromkeys(leaves, signal.SIGTERM) | dict.fromkeys(dies, signal.SIGKILL)
    stay = [rank for rank in range(size) if rank not in signals]
    args = signals, commits, len(stay)
    results = pool.run(train_while_ranks_go, size, args=args, may_die=dies)
    left = {require_in_peace(results[rank], results[stay[0]]) for rank in leaves}
    for rank in stay:
        code, steps, sizes = results[rank]
        assert (code, sizes[-1]) == (0, len(stay))
        if dies:
            assert set(steps) == set(range(steps[-1] + 1))
        elif commits:  # no step is lost, and none is done twice
            assert steps == list(range(len(steps)))
        else:  # an ObjectState begins at its last commit
            assert steps == [*range(*left), *range(STEPS)]


def test_a_job_that_all_ranks_leave_is_not_done():
    signals = dict.fromkeys(range(3), signal.SIGTERM)
    codes = [code for code, _, _ in pool.run(train_while_ranks_go, 3, args=(signals, True, 0))]
    assert codes == [ENDED] * 3


@on_ranks(2)
def test_an_interrupt_of_one_rank_alone_makes_all_regroup() -> None:
    """The program raises an interrupt of its own, on rank 0."""
    steps = []
    raises = hvd.rank() == 0

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        while state.step < STEPS:
            hvd.barrier()
            steps.append(state.step)
            state.step += 1
            if raises and len(steps) == 5:
                raise hvd.elastic.HostsUpdatedInterrupt
            state.commit()

    train(hvd.elastic.ObjectState(step=0))
    assert (steps[-1], hvd.size()) == (STEPS - 1, 2)
    assert set(steps) == set(range(STEPS))


@pytest.mark.parametrize(
    ("leave", "somebody_waits", "least", "leavers"),
    [
        ([0, 1, 0], True, 1, [1]),
        ([0, 0, 0], True, 1, []),
        ([1, 1, 1], False, 1, [0, 1, 2]),
        ([1, 1, 1], True, 1, []),  # its state would be lost
        ([0, 1, 1], True, 2, []),
        ([0, 1, 1], False, 2, [1, 2]),
    ],
)
def test_ranks_stay_until_a_process_that_waits_has_come(leave, somebody_waits, least, leavers):
    ranks = [(bool(leaves), somebody_waits and rank == 0) for rank, leaves in enumerate(leave)]
    assert leavers_of(ranks, Limits(1.0, 1.0, least)) == leavers


# --- the signal itself


class Job:
    """Counts this process's requests to leave."""

    is_member = True

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)

    def ask_to_leave(self) -> None:
        self.asked.release()


def signal_to_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def end_function(_: Job) -> None:
    signal_to_self()


def never_commit(job: Job) -> None:
    signal_to_self()
    job.asked.acquire()
    while True:
        time.sleep(1)


def wait_to_be_let_in(job: Job) -> None:
    job.is_member = False
    never_commit(job)


def leave(job: Job) -> None:
    signal_to_self()
    assert job.asked.acquire(timeout=60)
    raise SystemExit(3)


def fail(job: Job) -> None:
    signal_to_self()
    assert job.asked.acquire(timeout=60)
    raise ValueError("of the function")


def fork(job: Job) -> None:
    """A forked process is no rank, even while it runs no Python function."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM
    assert not job.asked.acquire(blocking=False)


def watch_signals(_: Job) -> None:
    preemption.watch(["SIGTERM"])
    signal_to_self()


def in_drain(body: Callable[[Job], None], after: Callable[[], None] | None = None) -> None:
    job = Job()
    with Drain(job, 0.2):
        body(job)
    if after is not None:
        after()


def stop_watching() -> None:
    preemption.watch(())
    signal_to_self()


def code_of(body: Callable[[Job], None], after: Callable[[], None] | None = None) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=in_drain, args=(body, after))
    process.start()
    process.join()
    return process.exitcode


def exit_codes() -> dict[str, int | None]:
    bodies = (end_function, never_commit, wait_to_be_let_in, leave, fail, fork)
    codes = {body.__name__: code_of(body) for body in bodies}
    codes["watch_signals"] = code_of(watch_signals)
    codes["stop_watching"] = code_of(watch_signals, stop_watching)
    return codes


def test_exit_codes():
    (codes,) = pool.run(exit_codes, 1)
    assert codes == {
        "end_function": -signal.SIGTERM,  # it has its usual effect then
        "never_commit": ENDED,
        "wait_to_be_let_in": -signal.SIGTERM,
        "leave": 3,
        "fail": -signal.SIGTERM,  # when the error has been logged
        "fork": 0,
        "watch_signals": 0,
        "stop_watching": -signal.SIGTERM,
    }


@on_ranks(1)
def test_the_programs_handler_stays() -> None:
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    job = Job()
    with Drain(job, 0.2):
        signal_to_self()
        assert got == [signal.SIGTERM]
    assert got == [signal.SIGTERM]
    assert not job.asked.acquire(blocking=False)
    signal.signal(signal.SIGTERM, before)  # the next test's process is this one
