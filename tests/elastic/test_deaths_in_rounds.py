# SPDX-License-Identifier: Apache-2.0
"""LocalSGD and DiLoCo while ranks die and join: the weights follow from formulas."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import namespaces
import pool
import pytest
import torch
from logs import logged
from on_ranks import on_ranks
from slow import slow
from training import assert_same_on_all_ranks

import torch_ring as hvd
from torch_ring.errors import PeerLostError
from torch_ring.optimizer import local_steps

EVERY, RATE, MOMENTUM, OUTER = 4, 0.25, 0.5, 0.5
EPOCHS, BATCHES = 5, 3
STEPS = EPOCHS * BATCHES


def target(rank: int) -> float:
    return float(3 * rank - 1)


def make(
    kind: str,
    delay: int = 0,
    agreeing: hvd.ProcessSet = hvd.global_process_set,
    host: hvd.ProcessSet | None = None,
) -> tuple[torch.nn.Linear, Any]:
    """Return a model, and its optimizer.

    Args:
        agreeing: the ranks of the rounds.
        host: the ranks that average their gradients.
    """
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    if host is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=host)
    if kind == "LocalSGD":
        return model, hvd.LocalSGD(optimizer, every=EVERY, process_set=agreeing)
    return model, hvd.DiLoCo(
        optimizer,
        outer_options={"lr": OUTER, "momentum": MOMENTUM},
        every=EVERY,
        delay=delay,
        process_set=agreeing,
    )


def start(*args: Any, **more: Any) -> tuple[torch.nn.Linear, Any, hvd.elastic.TorchState]:
    """Return a model, its optimizer, and their state; arguments as for `make`."""
    model, optimizer = make(*args)
    state = hvd.elastic.TorchState(model, optimizer, step=0, **more)
    state.sync()
    return model, optimizer, state


def backward(model: torch.nn.Linear, optimizer: Any, rank: int) -> None:
    optimizer.zero_grad()
    ((model.weight - target(rank)).square().sum() / 2).backward()


def of_all_ranks(tensor: torch.Tensor) -> list[float]:
    return hvd.allgather(tensor.detach()).flatten().tolist()


def agreed_of(optimizer: Any) -> torch.nn.Parameter:
    return optimizer.outer.param_groups[0]["params"][0]


# --- ranks that die


@dataclass(frozen=True)
class Case:
    """A training whose ranks die.

    Attributes:
        kind: of the optimizer.
        deaths: by rank, the number of its steps before its death.
        size: the number of ranks.
        delay: of means.
        commits: whether the state records the progress in commits only, and not in each batch.
        together: whether ranks meet before each step, and learn of a death there; if not, they
            learn of it when they agree.
        members: the ranks that agree; (): all.
        layout: the host of each rank; (): no matter.
    """

    kind: str
    deaths: Mapping[int, int]
    size: int = 3
    delay: int = 0
    commits: bool = False
    together: bool = False
    members: Sequence[int] = ()
    layout: Sequence[int] = ()


class Formula:
    """All hosts, each with one weight and its momentum, on one process; by default of one rank."""

    def __init__(self, case: Case) -> None:
        self.case, self.steps = case, 0
        self.host_of = dict(enumerate(case.layout or range(case.size)))
        self.own = dict.fromkeys(self.host_of.values(), 0.0)
        self.velocity = dict(self.own)
        self.agreed, self.outer_velocity = 0.0, 0.0
        self.sent: dict[int, float] | None = None  # the values of the pending mean

    def step(self) -> None:
        for host, weight in self.own.items():
            targets = [target(rank) for rank, place in self.host_of.items() if place == host]
            gradient = weight - sum(targets) / len(targets)
            self.velocity[host] = MOMENTUM * self.velocity[host] + gradient
            self.own[host] -= RATE * self.velocity[host]
        self.steps += 1
        if self.sent is not None and self.steps % EVERY == self.case.delay:
            self.end()
        if self.steps % EVERY == 0:
            self.begin()
            if not self.case.delay:
                self.end()

    def begin(self) -> None:
        members = self.case.members or self.own
        self.sent = {host: own for host, own in self.own.items() if host in members}

    def end(self) -> None:
        assert self.sent is not None
        mean = sum(self.agreed - weight for weight in self.sent.values()) / len(self.sent)
        self.outer_velocity = MOMENTUM * self.outer_velocity + mean
        self.agreed -= mean if self.case.kind == "LocalSGD" else OUTER * self.outer_velocity
        for host, weight in self.sent.items():
            self.own[host] += self.agreed - weight
        self.sent = None

    def end_round(self) -> None:
        if self.sent is not None:
            self.end()
        self.begin()
        self.end()

    def lose(self, victim: int) -> None:
        """Go on without a rank. A pending mean is part of the next one."""
        host = self.host_of.pop(victim)
        if host not in self.host_of.values():
            del self.own[host]
        self.sent = None


def expected(case: Case) -> dict[int, list[float]]:
    """Return by rank the weights after each step, and after the last round."""
    formula, taken = Formula(case), 0
    committed = copy.deepcopy(formula)
    found: dict[int, list[float]] = {rank: [] for rank in formula.host_of}

    def lose_the_dead() -> None:
        nonlocal formula, committed
        for victim in [rank for rank, step in case.deaths.items() if step == taken]:
            if case.commits:
                formula = copy.deepcopy(committed)
            formula.lose(victim)
            committed = copy.deepcopy(formula)

    def note() -> None:
        for rank, host in formula.host_of.items():
            found[rank].append(formula.own[host])

    while formula.steps < STEPS:
        lose_the_dead()
        formula.step()
        taken += 1
        note()
        if formula.steps % BATCHES == 0:
            committed = copy.deepcopy(formula)
    lose_the_dead()
    formula.end_round()
    note()
    return found


def train(case: Case) -> tuple[list[float], list[str]]:
    """Train in epochs; return the weights after each step and after the last round, and the log."""
    name, taken, host, agreeing = hvd.rank(), 0, None, hvd.global_process_set
    if case.layout:
        host, agreeing = hvd.hierarchy()
    elif case.members:
        agreeing = hvd.add_process_set(case.members)
    model, optimizer = make(case.kind, case.delay, agreeing, host)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)
    weights: list[float] = []

    def die_if_it_is_time() -> None:
        if case.deaths.get(name) == taken:
            os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def go_on(state: hvd.elastic.TorchState) -> None:
        nonlocal taken
        for epoch in range(state.epoch, EPOCHS):
            for batch in range(state.batch, BATCHES):
                die_if_it_is_time()
                if case.together:
                    hvd.barrier()
                backward(model, optimizer, name)
                optimizer.step()
                taken += 1
                weights.append(model.weight.item())
                if not case.commits:
                    state.batch = batch + 1
            state.epoch, state.batch = epoch + 1, 0
            if case.commits:
                state.commit()
        die_if_it_is_time()
        optimizer.end_round()

    with logged() as lines:
        go_on(state)
    if not case.delay and not case.members:
        assert_same_on_all_ranks(model.weight)
    if case.layout:
        assert_same_on_all_ranks(agreed_of(optimizer))
        assert len(optimizer.state_dict()["local_steps"]["agreed"]) == 1
    return [*weights, model.weight.item()], lines


def check(case: Case, transport: str, hosts: Sequence[str] = ()) -> None:
    """Check the weights of the survivors."""
    results = pool.run(
        train,
        len(case.layout) or case.size,
        args=(case,),
        transport=transport,
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1"} if hosts else {},
        may_die=[*case.deaths],
        namespaces=[hosts[host] for host in case.layout],
    )
    survivors = {rank: found for rank, found in enumerate(results) if rank not in case.deaths}
    right = expected(case)
    for rank, (weights, _) in survivors.items():
        assert weights == pytest.approx(right[rank], rel=1e-12, abs=1e-12)
    log = [line for _, lines in survivors.values() for line in lines]
    told = [line for line in log if "go back to the last commit" in line]
    assert len(told) == (len(case.deaths) if case.commits else 0)


@pytest.mark.parametrize(
    ("transport", "case"),
    [
        ("shm", Case("LocalSGD", {0: 1}, size=2)),  # in the first round
        ("tcp", Case("DiLoCo", {2: 7, 0: 10})),  # in the step at whose end the others agree
        ("shm", Case("LocalSGD", {1: STEPS})),  # while the others end the last round
        # All go back to their own commits.
        ("shm", Case("LocalSGD", {0: 8}, commits=True, together=True)),  # of a round before it
        ("tcp", Case("DiLoCo", {2: 8}, delay=3, commits=True, together=True)),  # a mean is pending
        # A mean that a death stops is in the next one: before it, and during one
        ("tcp", Case("DiLoCo", {1: 3, 2: 9}, delay=3, together=True)),
        # Ranks outside of the round die; rank 0 has the whole state, but never agrees.
        ("shm", Case("DiLoCo", {3: 2}, size=4, members=(1, 2), together=True)),
    ],
    ids=str,
)
def test_survivors_have_the_weights_of_the_formula(transport: str, case: Case) -> None:
    check(case, transport)


@pytest.mark.parametrize(
    ("layout", "deaths"),
    [
        # A host with all its ranks, and the rank of its host that meets the others
        ([0, 0, 1, 2], {2: 2, 0: 9}),
    ],
)
def test_hosts_go_on_without_the_dead(hosts, layout, deaths):
    check(Case("DiLoCo", deaths, together=True, layout=layout), "", hosts)


# --- recoveries in which ranks have different states


def fail(*_: Any, **__: Any) -> None:
    raise PeerLostError


@contextmanager
def failing(owner: Any, name: str) -> Iterator[None]:
    """Let another rank seem to die in a call of the owner's method."""
    with mock.patch.object(owner, name, fail), pytest.raises(PeerLostError):
        yield


@on_ranks(3)
def test_a_newcomer_gets_the_parameters_of_a_rank() -> None:
    """Rank 2 forgets its whole state, like a newcomer; the others are in a round of LocalSGD."""
    model, optimizer, state = start("LocalSGD")
    rank = hvd.rank()
    for state.step in range(7):
        backward(model, optimizer, rank)
        optimizer.step()
    made = make("LocalSGD")  # on all: it compares arguments
    if rank == 2:
        model, optimizer = made
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        state.on_arrival()
    state.reset()
    before = model.weight.item()
    state.resume()
    assert state.step == 6
    weights = of_all_ranks(model.weight)
    assert rank == 2 or model.weight.item() == before
    assert weights[2] == weights[0] != weights[1]
    optimizer.end_round()
    assert_same_on_all_ranks(model.weight)


@on_ranks(2)
def test_a_first_step_that_one_rank_has_taken_begins_the_round() -> None:
    """Rank 0 learns of a death while the first step compares weights; rank 1 completes the step."""
    model, optimizer, state = start("DiLoCo")
    state.step = 1
    compare = local_steps.require_consistent

    def compare_and_fail(*args: Any, **kwargs: Any) -> None:
        compare(*args, **kwargs)
        raise PeerLostError

    backward(model, optimizer, hvd.rank())
    if hvd.rank() == 0:
        with (
            mock.patch.object(local_steps, "require_consistent", compare_and_fail),
            pytest.raises(PeerLostError),
        ):
            optimizer.step()
    else:
        optimizer.step()
    state.reset()
    state.resume()
    optimizer.step()
    optimizer.end_round()
    assert_same_on_all_ranks(model.weight)


@on_ranks(2)
def test_an_agreement_that_fails_is_taken_back_in_all_fragments() -> None:
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(n)) for n in (3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = hvd.DiLoCo(optimizer, every=EVERY, fragments=2, delay=1)

    def step() -> None:
        sum(parameter.sum() for parameter in model).backward()
        optimizer.step()

    for _ in range(3):  # the first fragment's mean has begun at step 2
        step()
    rounds = optimizer._rounds
    before = rounds.state()["steps"], rounds.state()["fragments"]
    with failing(rounds, "_exchange"):
        step()
    assert (rounds.state()["steps"], rounds.state()["fragments"]) == before


@pytest.mark.parametrize("behind", [0, 3])
@on_ranks(4)
def test_a_rank_takes_the_state_of_its_host(behind: int) -> None:
    """Two hosts of two ranks, as process sets; one rank has not taken the last step."""
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3], [0, 2])]
    model, optimizer, state = start("DiLoCo", 0, sets[2], sets[hvd.rank() // 2])
    for _ in range(3):
        backward(model, optimizer, hvd.rank())
        optimizer.synchronize()
        if (hvd.rank(), state.step) == (behind, 2):
            continue
        with optimizer.skip_synchronize():
            optimizer.step()
        state.step += 1
    own = of_all_ranks(model.weight)
    state.reset()
    state.resume()
    assert state.step == 3
    weights = of_all_ranks(model.weight)
    first, second = own[1 - behind % 2 if behind < 2 else 0], own[3 if behind == 2 else 2]
    assert weights == [first, first, second, second]
    assert first != second
    momentum = of_all_ranks(optimizer.state[model.weight]["momentum_buffer"])
    assert momentum[0] == momentum[1] != momentum[2] == momentum[3]


@pytest.mark.parametrize("victim", [0, slow(1)])
@pytest.mark.parametrize(("on_hosts", "fails"), [(False, True), (True, False)])
@on_ranks(3)
def test_a_rank_that_has_missed_a_mean_takes_what_is_agreed(
    on_hosts: bool, victim: int, fails: bool
) -> None:
    """The end of a round has failed on one rank only, and then rank 2 has joined.

    Args:
        on_hosts: whether ranks 0 and 1 average their gradients.
        victim: that rank.
        fails: whether another rank dies in the recovery.
    """
    host, agreeing, delay = None, hvd.global_process_set, 2
    if on_hosts:
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2], [0, 2])]
        host, agreeing = sets[hvd.rank() // 2], sets[2]

    model, optimizer, state = start("DiLoCo", delay, agreeing, host)
    rounds = optimizer._rounds

    def end(fragment: Any) -> None:
        fragment.on_its_way.wait()
        if host is not None:
            fragment.on_its_way.tell(rounds._leader(), host, "DiLoCo")
        raise PeerLostError

    for state.step in range(EVERY + delay):
        backward(model, optimizer, hvd.rank())
        if (hvd.rank(), state.step) == (victim, EVERY + delay - 1):
            with mock.patch.object(rounds, "_end", end), pytest.raises(PeerLostError):
                optimizer.step()
        else:
            optimizer.step()
    own = of_all_ranks(model.weight)
    made = start("DiLoCo", delay, agreeing, host)
    if hvd.rank() == 2:
        model, optimizer, state = made
        state.on_arrival()
    state.reset()
    if fails:
        with failing(state._handlers["optimizer"], "copy_from"):
            state.resume()
        assert hvd.rank() == 2 or model.weight.item() == own[hvd.rank()]
    state.resume()
    assert optimizer._rounds.ended == [1]
    agreed = agreed_of(optimizer)
    assert_same_on_all_ranks(agreed, optimizer.outer.state[agreed]["momentum_buffer"])
    right = [*own[:2], agreed.item()]
    right[victim] = own[1 - victim] if on_hosts else agreed.item()
    assert of_all_ranks(model.weight) == right
