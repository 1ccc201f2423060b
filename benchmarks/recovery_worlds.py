"""kills(), cuts() and states(): times until forked ranks train on, or take a state of 100 MB."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import getpid

import namespaces
import torch
from forked_ranks import FORK_S, forked
from namespaces import Host
from recovery_program import Training
from start_line import Line, Ranks, WorldError, signals_taken
from step_log import StepLog
from world_starts import environment

import torch_ring as hvd

BEFORE = 20  # steps before a kill, at least
AFTER = 20  # steps of the survivors, whose times are measured
DEADLINE_S = 60.0  # of a world
HEARTBEAT_S = 1.0  # if a host is cut off
TENSORS = 25  # in the state that a newcomer takes


@dataclass(frozen=True)
class Recovery:
    """The recovery of one world's survivors.

    Attributes:
        ms: from the death to the end of the slowest survivor's first step, without a step's time.
        step_ms: the median step of the survivors.
    """

    ms: float
    step_ms: float


def kills(size: int, count: int, seed: int) -> dict[int, list[Recovery]]:
    """Kill a rank at a random moment in each of `count` worlds; return the results by victim."""
    chance = random.Random(seed)
    found: dict[int, list[Recovery]] = {rank: [] for rank in range(size)}
    for index in range(count):
        victim = index % size

        def kill(ranks: Ranks, pids: Sequence[int], victim: int = victim) -> float:
            time.sleep(chance.uniform(0.0, 0.05))
            return ranks.kill(victim, pids[victim])

        found[victim].append(recovery(size, (), [victim], kill))
    return found


def cuts(ranks_per_host: int, count: int, seed: int) -> list[Recovery]:
    """Cut off the second of two hosts, `count` times; return the times after the heartbeat timeout.

    Raises:
        OSError: there is no `ip`, or no right to use it.
    """
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        with namespaces.hosts(2) as hosts:

            def cut(_ranks: Ranks, _pids: Sequence[int], host: Host = hosts[1]) -> float:
                time.sleep(chance.uniform(0.0, 0.05))
                host.cut_off()
                return time.monotonic()

            lost = range(ranks_per_host, 2 * ranks_per_host)
            one = recovery(2 * ranks_per_host, hosts, lost, cut)
            found.append(Recovery(one.ms - 1e3 * HEARTBEAT_S, one.step_ms))
    return found


def recovery(
    size: int,
    hosts: Sequence[Host],
    lost: Sequence[int],
    lose: Callable[[Ranks, Sequence[int]], float],
) -> Recovery:
    """Start a world that trains, lose ranks of it, and return the others' recovery.

    Args:
        lose: removes the ranks in `lost`; returns the time of that.
    """
    log = StepLog(size)

    def body(line: Line) -> None:
        train(line, log)

    variables = environment(hosts, size, DEADLINE_S)
    heartbeat = {"TORCH_RING_HEARTBEAT_TIMEOUT": str(HEARTBEAT_S)} if hosts else {}
    with forked(size, body, lambda rank: {**variables(rank), **heartbeat}, hosts) as ranks:
        ranks.gather(FORK_S)
        ranks.open_gate()
        pids = [report["pid"] for report in ranks.gather(DEADLINE_S)]
        deadline = time.monotonic() + DEADLINE_S
        while min(log.count(rank) for rank in range(size)) < BEFORE:
            if time.monotonic() > deadline:
                raise WorldError(f"{size} ranks have not trained within {DEADLINE_S:.0f} s")
            with signals_taken():
                time.sleep(0.005)
        lost_at = lose(ranks, pids)
        survivors = [rank for rank in range(size) if rank not in lost]
        reports = {report["rank"]: report for report in ranks.gather(DEADLINE_S)}
        for rank in survivors:
            if reports[rank]["size"] != len(survivors):
                raise WorldError(f"rank {rank} went on as one of {reports[rank]['size']}")
    first, steps_ms = [], []
    for rank in survivors:
        ends = [step.ended for step in log.steps_of(rank) if step.size == len(survivors)]
        first.append(1e3 * (ends[0] - lost_at))
        steps_ms += [1e3 * (end - begin) for begin, end in itertools.pairwise(ends)]
    step_ms = statistics.median(steps_ms)
    return Recovery(max(first) - step_ms, step_ms)


def train(line: Line, log: StepLog) -> None:
    """Run as a rank that trains until `AFTER` steps after the loss of others."""
    line.report()
    line.wait()
    hvd.init()
    training = Training()
    line.report(pid=getpid())
    left = AFTER

    def ended(_step: int) -> bool:
        nonlocal left
        log.add(line.rank, hvd.size())
        left -= hvd.size() < line.size
        return left == 0

    try:
        training.run(ended)
    except hvd.RingError as error:  # of the ranks that were cut off
        line.report(size=0, text=str(error))
    else:
        line.report(size=hvd.size())
    line.wait()
    hvd.shutdown()


# --- a state for a newcomer


@dataclass(frozen=True)
class Transfer:
    """One round: seconds until the slowest rank had a state, or a broadcast of the same size."""

    state_s: float
    broadcast_s: float


def states(size: int, hosts: Sequence[Host], megabytes: int, rounds: int) -> list[Transfer]:
    """Alternate between giving a state to a newcomer and a broadcast of the same size."""

    def body(line: Line) -> None:
        give_states(line, megabytes * 10**6, rounds)

    with forked(size, body, environment(hosts, size, DEADLINE_S), hosts) as ranks:
        ranks.gather(FORK_S)
        ranks.open_gate()
        reports = ranks.gather(DEADLINE_S + 2 * rounds)
    times = zip(*(report["times"] for report in reports), strict=True)
    slowest = [max(of_all) for of_all in times][2:]  # the first round warms up
    pairs = zip(slowest[::2], slowest[1::2], strict=True)
    return [Transfer(state_s, broadcast_s) for state_s, broadcast_s in pairs]


def give_states(line: Line, size_bytes: int, rounds: int) -> None:
    line.report()
    line.wait()
    hvd.init()
    timed = TimedState(size_bytes)
    times = [time_s for _ in range(1 + rounds) for time_s in timed.round()]
    line.report(times=[round(time_s, 6) for time_s in times])
    line.wait()
    hvd.shutdown()


class TimedState:
    """A model of `size_bytes`, as the state of a training and as one tensor."""

    def __init__(self, size_bytes: int) -> None:
        self._flat = torch.zeros(size_bytes // 4)
        count = size_bytes // 4 // TENSORS
        self._model = torch.nn.ParameterList([torch.zeros(count) for _ in range(TENSORS)])
        self._state = hvd.elastic.TorchState(self._model, step=0)
        self._state.sync()

    def round(self) -> tuple[float, float]:
        """Return the seconds of a state that the last rank takes, and of a broadcast."""
        is_newcomer = hvd.rank() == hvd.size() - 1
        value = float(not is_newcomer)
        for parameter in self._model:
            torch.nn.init.constant_(parameter, value)
        if is_newcomer:
            self._state.on_arrival()
        hvd.barrier()
        began = time.monotonic()
        self._state.resume()
        state_s = time.monotonic() - began
        if not all(bool((parameter == 1).all()) for parameter in self._model):
            raise WorldError("the newcomer has another state")
        self._flat.fill_(value)
        hvd.barrier()
        began = time.monotonic()
        hvd.broadcast_(self._flat, 0, name="flat")
        broadcast_s = time.monotonic() - began
        if not bool((self._flat == 1).all()):
            raise WorldError("the broadcast has other numbers")
        return state_s, broadcast_s
