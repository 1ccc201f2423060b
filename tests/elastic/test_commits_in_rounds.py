"""LocalSGD and DiLoCo while ranks die: going back to a commit, and pending means."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Mapping, Sequence

import pool
import pytest
import torch
from logs import logged
from slow import slow
from training import assert_same_on_all_ranks

import torch_ring as hvd

EVERY, RATE, MOMENTUM, OUTER = 4, 0.25, 0.5, 0.5
EPOCHS, BATCHES = 5, 3
Deaths = Mapping[int, int]
"""Rank -> the number of its steps before its death."""


def target(rank: int) -> float:
    return float(3 * rank - 1)


def make(
    kind: str, delay: int, process_set: hvd.ProcessSet
) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    if kind == "LocalSGD":
        return model, hvd.LocalSGD(optimizer, every=EVERY, process_set=process_set)
    return model, hvd.DiLoCo(
        optimizer,
        outer_options={"lr": OUTER, "momentum": MOMENTUM},
        every=EVERY,
        delay=delay,
        process_set=process_set,
    )


class Formula:
    """All ranks, each with one weight and its momentum, on one process."""

    def __init__(self, kind: str, delay: int, size: int, members: Sequence[int]) -> None:
        self.kind, self.delay, self.members, self.steps = kind, delay, members, 0
        self.own, self.velocity = dict.fromkeys(range(size), 0.0), dict.fromkeys(range(size), 0.0)
        self.agreed, self.outer_velocity = 0.0, 0.0
        self.sent: dict[int, float] | None = None  # the values of the pending mean

    def step(self) -> None:
        for rank, weight in self.own.items():
            self.velocity[rank] = MOMENTUM * self.velocity[rank] + weight - target(rank)
            self.own[rank] -= RATE * self.velocity[rank]
        self.steps += 1
        if self.sent is not None and self.steps % EVERY == self.delay:
            self.end()
        if self.steps % EVERY == 0:
            self.begin()
            if not self.delay:
                self.end()

    def begin(self) -> None:
        self.sent = {rank: own for rank, own in self.own.items() if rank in self.members}

    def end(self) -> None:
        assert self.sent is not None
        mean = sum(self.agreed - weight for weight in self.sent.values()) / len(self.sent)
        self.outer_velocity = MOMENTUM * self.outer_velocity + mean
        self.agreed -= mean if self.kind == "LocalSGD" else OUTER * self.outer_velocity
        for rank, weight in self.sent.items():
            self.own[rank] += self.agreed - weight
        self.sent = None

    def end_round(self) -> None:
        if self.sent is not None:
            self.end()
        self.begin()
        self.end()

    def lose(self, victim: int) -> None:
        """Go on without a rank. A pending mean is part of the next one."""
        del self.own[victim]
        self.sent = None


def train(
    kind: str, delay: int, deaths: Deaths, commits: bool, members: Sequence[int]
) -> tuple[list[float], dict[int, float], list[str]]:
    """Train in epochs; return the weights after each step, at the end by rank, and the log.

    Args:
        deaths: happen before a barrier, so that the others learn of them in the same step.
        commits: whether the state records the progress in commits only, and not in each batch.
        members: the ranks that agree.
    """
    name, taken = hvd.rank(), 0
    is_global = len(members) == hvd.size()
    process_set = hvd.global_process_set if is_global else hvd.add_process_set(members)
    model, optimizer = make(kind, delay, process_set)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)
    weights: list[float] = []

    @hvd.elastic.run
    def go_on(state: hvd.elastic.TorchState) -> None:
        nonlocal taken
        for epoch in range(state.epoch, EPOCHS):
            for batch in range(state.batch, BATCHES):
                optimizer.zero_grad()
                ((model.weight - target(name)).square().sum() / 2).backward()
                if deaths.get(name) == taken:
                    os.kill(os.getpid(), signal.SIGKILL)
                hvd.barrier()
                optimizer.step()
                taken += 1
                weights.append(model.weight.item())
                if not commits:
                    state.batch = batch + 1
            state.epoch, state.batch = epoch + 1, 0
            if commits:
                state.commit()

    with logged() as lines:
        go_on(state)
    last = model.weight.item()
    optimizer.end_round()
    if not delay and is_global:
        assert_same_on_all_ranks(model.weight)
    return weights, {name: last, -1: model.weight.item()}, lines


def expected(
    kind: str, delay: int, size: int, deaths: Deaths, commits: bool, members: Sequence[int]
) -> tuple[dict[int, list[float]], Formula]:
    formula, left = Formula(kind, delay, size, members), dict(deaths)
    found: dict[int, list[float]] = {rank: [] for rank in range(size)}
    committed = copy.deepcopy(formula)
    taken = 0
    while formula.steps < EPOCHS * BATCHES:
        for victim in [rank for rank, step in left.items() if step == taken]:
            del left[victim]
            if commits:
                formula = copy.deepcopy(committed)
            formula.lose(victim)
            committed = copy.deepcopy(formula)
        formula.step()
        taken += 1
        for rank, weight in formula.own.items():
            found[rank].append(weight)
        if formula.steps % BATCHES == 0:
            committed = copy.deepcopy(formula)
    return found, formula


def check(
    kind: str,
    delay: int,
    size: int,
    deaths: Deaths,
    *,
    commits: bool,
    members: Sequence[int] | None = None,
) -> list[list[str]]:
    """Check the weights of the survivors; return the log of each."""
    members = range(size) if members is None else members
    args = (kind, delay, deaths, commits, members)
    results = pool.run(train, size, args=args, may_die=[*deaths])
    right, formula = expected(kind, delay, size, deaths, commits, members)
    ended = copy.deepcopy(formula)
    ended.end_round()
    logs = []
    for rank in set(range(size)) - deaths.keys():
        weights, last, lines = results[rank]
        assert weights == pytest.approx(right[rank], rel=1e-12, abs=1e-12)
        assert last[rank] == pytest.approx(formula.own[rank], rel=1e-12)
        assert last[-1] == pytest.approx(ended.own[rank], rel=1e-12)
        logs.append(lines)
    return logs


@pytest.mark.parametrize(
    ("kind", "delay", "size", "deaths"),
    [
        ("LocalSGD", 0, 3, {0: 8}),  # after a round that began before the commit
        ("DiLoCo", 0, 3, {1: 8}),
        ("DiLoCo", 3, 3, {2: 8}),  # the commit was made while a mean was pending
        slow("LocalSGD", 0, 2, {1: 7}),  # in the step that ends a round
        slow("DiLoCo", 0, 2, {0: 2}),  # before any commit but the first
        slow("DiLoCo", 2, 4, {0: 5, 3: 10}),
    ],
)
def test_all_ranks_go_back_to_their_own_commit(kind, delay, size, deaths):
    logs = check(kind, delay, size, deaths, commits=True)
    told = [line for lines in logs for line in lines if "go back to the last commit" in line]
    assert len(told) == len(deaths)


@pytest.mark.parametrize(
    ("delay", "size", "deaths"),
    [
        (2, 3, {0: 5}),  # the first mean is pending
        (3, 3, {1: 3, 2: 9}),  # before it, and while another one is
        slow(1, 2, {1: 4}),
        slow(3, 4, {0: 6, 2: 6}),
        slow(2, 3, {2: 14}),  # in the last step
    ],
)
def test_a_mean_that_a_death_stops_is_in_the_next_one(delay, size, deaths):
    check("DiLoCo", delay, size, deaths, commits=False)


@pytest.mark.parametrize(
    ("kind", "deaths", "commits"),
    [
        ("DiLoCo", {3: 2}, False),  # in the first round
        ("LocalSGD", {3: 2}, False),
        slow("DiLoCo", {3: 6}, False),
        slow("LocalSGD", {3: 5}, False),
        slow("DiLoCo", {3: 5}, True),
    ],
)
def test_a_round_goes_on_when_ranks_outside_of_it_die(kind, deaths, commits):
    """Rank 0 lives and has the whole state, but takes part in no agreement."""
    check(kind, 0, 4, deaths, commits=commits, members=[1, 2])


def converge(delay: int, fragments: int, victim: int, at: int) -> list[float]:
    """Train to convergence; ranks wait for one another only at the ends of rounds."""
    name = hvd.rank()
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 2)]
    model = torch.nn.ParameterList(parameters)
    optimizer = hvd.DiLoCo(
        torch.optim.SGD(parameters, lr=RATE),
        outer_options={"lr": 1.0},
        every=EVERY,
        fragments=fragments,
        delay=delay,
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def go_on(state: hvd.elastic.TorchState) -> None:
        for state.step in range(state.step, 160):
            if (name, state.step) == (victim, at):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            sum((p - target(name)).square().sum() / 2 for p in parameters).backward()
            optimizer.step()
        state.step = 160
        optimizer.end_round()

    go_on(state)
    agreed = [p for group in optimizer.outer.param_groups for p in group["params"]]
    assert_same_on_all_ranks(*agreed)
    return [value for p in agreed for value in p.tolist()]


@pytest.mark.parametrize(
    ("delay", "fragments", "victim", "at"),
    [(2, 1, 0, 13), slow(3, 1, 1, 12), slow(1, 2, 2, 11), slow(3, 2, 0, 14)],
)
def test_survivors_agree_whenever_they_hear_of_a_death(delay, fragments, victim, at):
    found = pool.run(converge, 3, args=(delay, fragments, victim, at), may_die=[victim])
    survivors = set(range(3)) - {victim}
    mean = sum(map(target, survivors)) / 2
    for rank in survivors:
        assert found[rank] == pytest.approx([mean] * 5, rel=1e-6)
