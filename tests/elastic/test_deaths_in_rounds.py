"""LocalSGD and DiLoCo while ranks die and join."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import namespaces
import pool
import pytest
import torch
from slow import on_shm_and_slowly_on_tcp, slow
from training import assert_same_on_all_ranks

import torch_ring as hvd
from torch_ring.errors import PeerLostError
from torch_ring.optimizer import local_steps

STEPS, EVERY, RATE, OUTER = 14, 4, 0.25, 0.5


def target(rank: int) -> float:
    return float(3 * rank - 1)


def make(kind: str, delay: int = 0) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    if kind == "LocalSGD":
        return model, hvd.LocalSGD(optimizer, every=EVERY)
    options = {"lr": OUTER, "momentum": 0.5}
    return model, hvd.DiLoCo(optimizer, outer_options=options, every=EVERY, delay=delay)


def train_with_deaths(kind: str, deaths: Sequence[tuple[int, int]]) -> list[float]:
    """Train until the end; return the weight after each step of this rank."""
    name = hvd.rank()
    model, optimizer = make(kind)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    weights: dict[int, float] = {}

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        for state.step in range(state.step, STEPS):
            optimizer.zero_grad()
            ((model.weight - target(name)).square().sum() / 2).backward()
            if (name, state.step) in deaths:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            weights[state.step] = model.weight.item()
        state.step = STEPS
        if (name, STEPS) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.end_round()

    train(state)
    assert_same_on_all_ranks(model.weight)
    return [*weights.values(), model.weight.item()]


def expected(kind: str, size: int, deaths: Sequence[tuple[int, int]]) -> dict[int, list[float]]:
    """Return the weights by the formulas. A rank that dies has no part in its last round."""
    own = dict.fromkeys(range(size), 0.0)
    found: dict[int, list[float]] = {rank: [] for rank in own}
    agreed, velocity = 0.0, 0.0

    def end_round() -> None:
        nonlocal agreed, velocity
        mean = sum(agreed - weight for weight in own.values()) / len(own)
        velocity = 0.5 * velocity + mean
        agreed -= mean if kind == "LocalSGD" else OUTER * velocity
        own.update(dict.fromkeys(own, agreed))

    for step in range(STEPS):
        for rank in list(own):
            if (rank, step) in deaths:
                del own[rank]
        for rank in own:
            own[rank] -= RATE * (own[rank] - target(rank))
        if (step + 1) % EVERY == 0:
            end_round()
        for rank, weight in own.items():
            found[rank].append(weight)
    for rank in list(own):
        if (rank, STEPS) in deaths:
            del own[rank]
    end_round()
    for rank, weight in own.items():
        found[rank].append(weight)
    return found


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
@pytest.mark.parametrize(
    ("size", "deaths"),
    [
        (2, [(0, 1)]),  # in the first round
        (3, [(2, 7)]),  # in the step at whose end the others meet
        (3, [(0, 5), (1, 10)]),
        (4, [(1, 6), (3, 6)]),
        (3, [(1, STEPS)]),  # while the others end the last round
    ],
)
@on_shm_and_slowly_on_tcp
def test_survivors_go_on_in_the_round(kind, size, deaths, transport):
    victims = [rank for rank, _ in deaths]
    found = pool.run(
        train_with_deaths, size, args=(kind, deaths), transport=transport, may_die=victims
    )
    right = expected(kind, size, deaths)
    for rank in set(range(size)) - set(victims):
        assert found[rank] == pytest.approx(right[rank], rel=1e-12)


def newcomer(kind: str, delay: int) -> None:
    """Rank 2 forgets its whole state, like a newcomer; the others are in a round."""
    model, optimizer = make(kind, delay)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.sync()
    rank = hvd.rank()
    for state.step in range(7):
        optimizer.zero_grad()
        ((model.weight - target(rank)).square().sum() / 2).backward()
        optimizer.step()
    if rank == 2:
        model, optimizer = make(kind, delay)
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        state.on_arrival()
    else:
        make(kind, delay)  # compares arguments
    state.reset()
    before = model.weight.item()
    state.resume()
    assert state.step == 6
    weights = hvd.allgather(model.weight.detach()).flatten().tolist()
    assert rank == 2 or model.weight.item() == before
    if kind == "LocalSGD":
        assert weights[2] == weights[0] != weights[1]
    else:
        agreed = optimizer.outer.param_groups[0]["params"]
        assert_same_on_all_ranks(*agreed)
        assert weights[2] == agreed[0].item() != weights[0]
        momentum = [s["momentum_buffer"] for s in optimizer.outer.state.values()]
        assert_same_on_all_ranks(*momentum)
        assert len(momentum) == 1
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.step()
    optimizer.end_round()
    if delay == 0:
        assert_same_on_all_ranks(model.weight)


@pytest.mark.parametrize(("kind", "delay"), [("LocalSGD", 0), ("DiLoCo", 0), ("DiLoCo", 3)])
@on_shm_and_slowly_on_tcp
def test_a_newcomer_gets_agreed_parameters(kind, delay, transport):
    pool.run(newcomer, 3, args=(kind, delay), transport=transport)


def begin_unheard() -> None:
    """Rank 0 learns of a death while the first step compares weights; rank 1 completes the step."""
    model, optimizer = make("DiLoCo")
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.sync()
    state.step = 1
    compare = local_steps.require_consistent

    def fail(*args: Any, **kwargs: Any) -> None:
        compare(*args, **kwargs)
        raise PeerLostError

    optimizer.zero_grad()
    ((model.weight - target(hvd.rank())).square().sum() / 2).backward()
    if hvd.rank() == 0:
        local_steps.require_consistent = fail
        with pytest.raises(PeerLostError):
            optimizer.step()
        local_steps.require_consistent = compare
    else:
        optimizer.step()
    state.reset()
    state.resume()
    optimizer.step()
    optimizer.end_round()
    assert_same_on_all_ranks(model.weight)


def test_a_first_step_that_one_rank_has_taken_begins_the_round():
    pool.run(begin_unheard, 2)


def take_half_of_another_state() -> None:
    """Rank 0 is ahead by a step of another optimizer, and dies when rank 1 has those weights."""
    model, optimizer = make("DiLoCo")
    second, sgd = torch.nn.Linear(1, 1), torch.optim.SGD
    torch.nn.init.ones_(second.weight)
    other = hvd.DistributedOptimizer(sgd(second.parameters(), lr=RATE, momentum=0.5))
    state = hvd.elastic.TorchState(model, optimizer, second=second, other=other, step=0)
    state.sync()
    for state.step in (1, 2):
        other.zero_grad()
        second(torch.ones(1, 1)).sum().backward()
        other.synchronize()
        if state.step == 1 or hvd.rank() == 0:
            with other.skip_synchronize():
                other.step()
    own = second.weight.item()
    state.reset()

    def fail(*_: Any) -> None:
        raise PeerLostError

    state._handlers["other"].copy_from = fail  # type: ignore[method-assign]
    with pytest.raises(PeerLostError):
        state.resume()
    del state._handlers["other"].copy_from
    if hvd.rank() == 0:
        state.on_arrival()  # another process in its place
    state.reset()
    state.resume()
    assert second.weight.item() == hvd.broadcast_object(own, root_rank=1)


def test_a_half_of_the_state_of_another_optimizer_does_not_count():
    pool.run(take_half_of_another_state, 2)


# --- gradients inside hosts, rounds between them


def train_on_hosts(deaths: Sequence[tuple[int, int]], together: bool) -> list[float]:
    """Train until the end; return the weight after each step of this rank.

    With `together`, all ranks meet before each step, and learn of a death there.
    """
    name = hvd.rank()
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    host, one_of_each_host = hvd.hierarchy()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, process_set=host)
    optimizer = hvd.DiLoCo(
        optimizer,
        outer_options={"lr": OUTER, "momentum": 0.5},
        every=EVERY,
        process_set=one_of_each_host,
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    weights: dict[int, float] = {}

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < STEPS:
            if (name, state.step) in deaths:
                os.kill(os.getpid(), signal.SIGKILL)
            if together:
                hvd.barrier()
            optimizer.zero_grad()
            ((model.weight - target(name)).square().sum() / 2).backward()
            optimizer.step()
            weights[state.step] = model.weight.item()
            state.step += 1
            momentum = optimizer.state[model.weight]["momentum_buffer"]
            for each in (model.weight.detach(), momentum):
                assert hvd.allgather(each, process_set=host).unique().numel() == 1
        optimizer.end_round()

    train(state)
    assert_same_on_all_ranks(model.weight, *optimizer.outer.param_groups[0]["params"])
    return [*weights.values(), model.weight.item()]


def expected_on_hosts(
    layout: Sequence[int], deaths: Sequence[tuple[int, int]]
) -> dict[int, list[float]]:
    """Return the weights by the formulas: a host has the weight and the momentum of its ranks."""
    living = set(range(len(layout)))
    own: dict[int, list[float]] = {host: [0.0, 0.0] for host in layout}
    found: dict[int, list[float]] = {rank: [] for rank in living}
    agreed, velocity = 0.0, 0.0

    def end_round() -> None:
        nonlocal agreed, velocity
        mean = sum(agreed - weight for weight, _ in own.values()) / len(own)
        velocity = 0.5 * velocity + mean
        agreed -= OUTER * velocity
        for state in own.values():
            state[0] = agreed

    for step in range(STEPS):
        living -= {rank for rank in living if (rank, step) in deaths}
        own = {host: own[host] for host in {layout[rank] for rank in living}}
        for host, state in own.items():
            targets = [target(rank) for rank in living if layout[rank] == host]
            gradient = state[0] - sum(targets) / len(targets)
            state[1] = 0.5 * state[1] + gradient if step else gradient
            state[0] -= RATE * state[1]
        if (step + 1) % EVERY == 0:
            end_round()
        for rank in living:
            found[rank].append(own[layout[rank]][0])
    end_round()
    for rank in living:
        found[rank].append(agreed)
    return found


@pytest.mark.parametrize(
    ("layout", "deaths"),
    [
        ([0, 0, 1, 1], [(0, 6)]),  # the rank of its host that meets the other host
        ([0, 0, 1, 1], [(3, 4)]),
        slow([0, 0, 1, 2], [(2, 2), (1, 9)]),  # a host with all its ranks
        slow([0, 0, 1, 1], [(2, 1), (3, 1), (0, 10)]),
    ],
)
@pytest.mark.parametrize("together", [True, slow(False)])
def test_hosts_go_on_without_the_dead(hosts, layout, deaths, together):
    victims = [rank for rank, _ in deaths]
    found = pool.run(
        *(train_on_hosts, len(layout)),
        args=(deaths, together),
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1"},
        may_die=victims,
        namespaces=[hosts[host] for host in layout],
    )
    left = sorted(set(range(len(layout))) - set(victims))
    if not together:  # hosts learn of it at different steps
        assert len({found[rank][-1] for rank in left}) == 1
        return
    right = expected_on_hosts(layout, deaths)
    for rank in left:
        assert found[rank] == pytest.approx(right[rank], rel=1e-12)


def fall_behind(behind: int) -> None:
    """Two hosts of two ranks, as process sets; one rank has not taken the last step."""
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3], [0, 2])]
    host = sets[hvd.rank() // 2]
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    optimizer = hvd.DiLoCo(
        hvd.DistributedOptimizer(optimizer, process_set=host), every=100, process_set=sets[2]
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.sync()
    for _ in range(4):
        optimizer.zero_grad()
        ((model.weight - target(hvd.rank())).square().sum() / 2).backward()
        optimizer.synchronize()
        if (hvd.rank(), state.step) == (behind, 3):
            continue
        with optimizer.skip_synchronize():
            optimizer.step()
        state.step += 1
    own = hvd.allgather(model.weight.detach()).flatten().tolist()
    state.reset()
    state.resume()
    assert state.step == 4
    weights = hvd.allgather(model.weight.detach()).flatten().tolist()
    first, second = own[1 - behind % 2 if behind < 2 else 0], own[3 if behind == 2 else 2]
    assert weights == [first, first, second, second]
    assert first != second
    momentum = hvd.allgather(optimizer.state[model.weight]["momentum_buffer"]).flatten()
    assert momentum[0] == momentum[1] != momentum[2] == momentum[3]


@pytest.mark.parametrize("behind", [0, 1, 2, 3])
def test_a_rank_takes_the_state_of_its_host(behind):
    pool.run(fall_behind, 4, args=(behind,))


def miss_a_mean(on_hosts: bool, victim: int, delay: int, comes: bool, fails: str) -> None:
    """The end of a round has failed on one rank only.

    Args:
        on_hosts: whether ranks 0 and 1 average their gradients.
        victim: that rank.
        delay: of the round.
        comes: whether rank 2 has just joined.
        fails: the part of the recovery in which another rank dies: "copy", "neighbour" or "".
    """
    host, agreeing = hvd.global_process_set, hvd.global_process_set
    if on_hosts:
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2], [0, 2])]
        host, agreeing = sets[hvd.rank() // 2], sets[2]

    def make_state() -> tuple[torch.nn.Linear, Any, hvd.elastic.TorchState]:
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        if on_hosts:
            optimizer = hvd.DistributedOptimizer(optimizer, process_set=host)
        options = {"lr": OUTER, "momentum": 0.5}
        optimizer = hvd.DiLoCo(
            optimizer, outer_options=options, every=EVERY, delay=delay, process_set=agreeing
        )
        return model, optimizer, hvd.elastic.TorchState(model, optimizer, step=0)

    model, optimizer, state = make_state()
    state.sync()
    rounds = optimizer._rounds

    def end(fragment: Any) -> None:
        fragment.on_its_way.wait()
        if on_hosts:
            fragment.on_its_way.tell(rounds._leader(), host, "DiLoCo")
        raise PeerLostError

    for state.step in range(EVERY + delay):
        optimizer.zero_grad()
        ((model.weight - target(hvd.rank())).square().sum() / 2).backward()
        if (hvd.rank(), state.step) == (victim, EVERY + delay - 1):
            rounds._end = end
            with pytest.raises(PeerLostError):
                optimizer.step()
            del rounds._end
        else:
            optimizer.step()
    own = hvd.allgather(model.weight.detach()).flatten().tolist()
    if comes:
        made = make_state()
        if hvd.rank() == 2:
            model, optimizer, state = made
            state.on_arrival()
    state.reset()

    def fail(*_: Any) -> None:
        raise PeerLostError

    if fails == "copy":
        state._handlers["optimizer"].copy_from = fail
        with pytest.raises(PeerLostError):
            state.resume()
        assert model.weight.item() == own[hvd.rank()] or (comes and hvd.rank() == 2)
        del state._handlers["optimizer"].copy_from
    elif fails == "neighbour":
        if hvd.rank() < 2:
            state._handlers["optimizer"]._copy_from_neighbour = fail
            with pytest.raises(PeerLostError):
                state.resume()
            del state._handlers["optimizer"]._copy_from_neighbour
        else:
            state.resume()
    state.resume()
    assert optimizer._rounds.ended == [1]
    agreed = optimizer.outer.param_groups[0]["params"][0]
    assert_same_on_all_ranks(agreed, optimizer.outer.state[agreed]["momentum_buffer"])
    weights = hvd.allgather(model.weight.detach()).flatten().tolist()
    right = [*own[:2], agreed.item() if comes else own[2]]
    right[victim] = own[1 - victim] if on_hosts else agreed.item()
    assert weights == right
    if not delay:
        assert set(weights) == {agreed.item()}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("on_hosts", "delay", "comes", "fails"),
    [
        (False, 0, False, ""),
        (False, 0, True, ""),
        (False, 2, True, "copy"),
        (True, 2, True, ""),
        (True, 2, False, "neighbour"),
    ],
)
def test_a_rank_that_has_missed_a_mean_takes_what_is_agreed(on_hosts, victim, delay, comes, fails):
    pool.run(miss_a_mean, 3, args=(on_hosts, victim, delay, comes, fails))


def lead_the_others(victim: int) -> None:
    """One rank of each host agrees, and the others step alone, until that rank dies."""
    name = hvd.rank()
    _, one_of_each_host = hvd.hierarchy()
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {"lr": OUTER, "momentum": 0.5}
    optimizer = hvd.DiLoCo(
        optimizer, outer_options=options, every=EVERY, process_set=one_of_each_host
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < STEPS:
            if (name, state.step) == (victim, 6):
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()
            optimizer.zero_grad()
            ((model.weight - target(name)).square().sum() / 2).backward()
            optimizer.step()
            state.step += 1
        optimizer.end_round()

    train(state)
    assert_same_on_all_ranks(model.weight, *optimizer.outer.param_groups[0]["params"])
    assert len(optimizer.state_dict()["local_steps"]["agreed"]) == 1


def test_another_rank_of_a_host_agrees_for_a_dead_one(hosts):
    pool.run(
        lead_the_others,
        3,
        args=(0,),
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1"},
        may_die=[0],
        namespaces=[hosts[0], hosts[0], hosts[1]],
    )
