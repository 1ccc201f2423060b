# SPDX-License-Identifier: Apache-2.0
"""TorchState, ObjectState and ElasticSampler: Horovod's meaning, and going on without a commit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pool
import pytest
import torch
from on_ranks import on_ranks

import torch_ring as hvd
from torch_ring.elastic.state import (
    NONE,
    WHOLE,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)


def model_of(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


@on_ranks(2)
def test_commit_and_restore() -> None:
    model = model_of(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    values = {"model": model, "optimizer": optimizer, "sampler": sampler}
    state = hvd.elastic.TorchState(**values, batch=0, seen=[])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.batch = 3
    sampler.record_batch(0, 2)
    state.restore()
    assert torch.equal(model.weight, torch.ones(1, 2))
    assert not optimizer.state_dict()["state"]
    assert (state.batch, sampler.processed_num) == (0, 0)
    state.batch = 4
    state.seen.append("a")
    sampler.record_batch(0, 2)
    state.commit()
    state.batch = 5
    state.seen.append("b")
    sampler.record_batch(1, 2)
    state.restore()
    assert (state.batch, state.seen, sampler.processed_num) == (4, ["a"], 2 * hvd.size())
    other = model_of(7.0)
    state.model = other
    torch.nn.init.zeros_(other.weight)
    state.restore()
    assert state.model is other
    assert torch.equal(other.weight, torch.full((1, 2), 7.0))


@on_ranks(3)
def test_sync_gives_the_committed_values_of_rank_0() -> None:
    rank = hvd.rank()
    model = model_of(float(rank))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    sampler = hvd.elastic.ElasticSampler(range(12), shuffle=False)
    sampler.record_batch(0, rank)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=rank, extra={"a": rank})
    state.batch = 100 + rank  # uncommitted: all ranks get rank 0's committed value
    state.sync()
    assert torch.equal(model.weight, torch.zeros(1, 2))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (state.batch, state.extra) == (0, {"a": 0})
    assert sampler.processed_num == (hvd.size() - 1) * hvd.size()  # the farthest


def test_a_sampler_deals_what_is_left() -> None:
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    shares = []
    for rank in range(4):
        sampler.num_replicas, sampler.rank = 4, rank
        sampler.num_samples, sampler.total_size = 3, 12
        shares.append(list(sampler))
    assert shares == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    sampler.reset()
    sampler.record_batch(0, 4)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 4}
    sampler.load_state_dict({"epoch": 1, "processed_num": 7})
    assert (sampler.epoch, list(sampler), len(sampler)) == (1, [7, 8, 9], 3)
    sampler.set_epoch(2)
    assert list(sampler) == list(range(10))
    shuffled = hvd.elastic.ElasticSampler(range(10), seed=3)
    first = list(shuffled)
    shuffled.set_epoch(1)
    assert sorted(first) == sorted(shuffled) == list(range(10))
    assert first != list(shuffled)
    assert list(hvd.elastic.ElasticSampler(range(1))) == [0]
    assert not list(hvd.elastic.ElasticSampler(range(0)))


class Counter:
    """A value with a handler of the user's."""

    count = 0


class CounterHandler(StateHandler):
    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def copy_from(self, root: int) -> None:
        self.value.count = hvd.broadcast_object(self.value.count, root)


@on_ranks(2)
def test_a_handler_of_the_users() -> None:
    set_handler_registry([*get_handler_registry(), (Counter, CounterHandler)])
    counter = Counter()
    state = hvd.elastic.TorchState(counter=counter)
    state.save()
    counter.count = 4
    state.restore()
    assert counter.count == 0
    counter.count = 1 + hvd.rank()
    state.sync()
    assert counter.count == 1
    set_handler_registry(get_handler_registry()[:-1])


@pytest.mark.parametrize(
    ("updates", "raises", "skip_sync"),
    [([], False, False), ([1], True, True), ([2, 1], True, False)],
)
@on_ranks(2)
def test_a_commit_interrupts_all_ranks(updates: list[int], raises: bool, skip_sync: bool) -> None:
    state = hvd.elastic.ObjectState(batch=0)
    if hvd.rank() == 0:
        for timestamp, result in enumerate(updates, 1):
            state.on_hosts_updated(timestamp, result)
    if not raises:
        state.commit()
        return
    with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skip_sync
    state.commit()  # they are no news now


def go_on_from_a_commit() -> list[tuple[int, float]]:
    """Train with attributes that change at commits only; rank 1 dies in step 5.

    A callback is called after the states are synchronised: its changes stay.
    """
    model = model_of(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    name = hvd.rank()
    seen: list[tuple[int, float]] = []

    def on_reset() -> None:
        seen.append((state.step, hvd.size()))
        optimizer.param_groups[0]["lr"] = 0.5

    state.register_reset_callbacks([on_reset])

    @hvd.elastic.run
    def train(state: Any) -> None:
        for step in range(state.step, 8):
            seen.append((step, model.bias.item()))
            optimizer.zero_grad()
            loss = model(torch.zeros(1, 2)).sum()
            if (name, step) == (1, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            if (step + 1) % 4 == 0:
                state.step = step + 1
                state.commit()

    train(state)
    return seen


def test_progress_without_attributes_is_that_of_commits_and_callbacks_come_last() -> None:
    seen = pool.run(go_on_from_a_commit, 2, may_die=[1])[0]
    after = [(4, 1), (4, -4.0), (5, -4.5), (6, -5.0), (7, -5.5)]
    assert seen == [*((step, -float(step)) for step in range(6)), *after]


@pytest.mark.parametrize(("behind", "restores"), [(0, False), (1, False), (0, True)])
@on_ranks(3)
def test_a_rank_that_is_a_step_behind_takes_the_others_state(behind: int, restores: bool) -> None:
    """One rank has not taken the last step, or has gone back to a commit, when the world ends."""
    rank = hvd.rank()
    model = model_of(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.sync()
    for state.step in range(4):
        model(torch.zeros(1, 2)).sum().backward()
        if rank == behind and state.step == 3 and not restores:
            break
        optimizer.step()
        optimizer.zero_grad()
        if state.step == 2:
            state.commit()
    if rank == behind and restores:
        state.restore()
    state.resume()
    momentum = optimizer.state_dict()["state"][1]["momentum_buffer"]
    assert (model.bias.item(), state.step, momentum.item()) == (-6.125, 3, 1.875)


@pytest.mark.parametrize("arrived", [[], [1], [0, 2]])
@on_ranks(3)
def test_a_state_comes_from_a_rank_that_has_one(arrived: Sequence[int]) -> None:
    """Newcomers, and ranks whose first sync failed, have no state to copy."""
    wanted = (5.0, 5) if arrived else (0.0, 0)
    rank = hvd.rank()
    model = model_of(float(rank))
    state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=1.0), step=rank)
    if arrived:
        state.sync()
        state.step = 5
        torch.nn.init.constant_(model.bias, 5.0)
    if rank in arrived:
        state.on_arrival()
        state.step = 9
    state.resume()
    assert (model.bias.item(), state.step) == wanted


def resume_after_half_a_copy(has_saved: bool) -> tuple[str, float, float, int]:
    """The ranks have received a part of the state of a rank that died while it sent the state."""
    model = torch.nn.ModuleDict({"first": model_of(1.0), "second": model_of(1.0)})
    state = hvd.elastic.TorchState(model, other=model_of(1.0), step=1)
    state.sync()
    if not has_saved:
        state.on_arrival()
    else:
        state.step = 7
        torch.nn.init.constant_(state.other.bias, 7.0)
        state.commit()
    broadcast = state._handlers["other"].copy_from
    state._handlers["other"].copy_from = fail_to_copy
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 9.0)
    if hvd.rank() == 0:  # the rank that really dies
        state._parts = WHOLE
        state._steps += 1
    with contextlib.suppress(hvd.RingError):
        state._copy_from(0, {}, models=True)
    if hvd.rank() == 0:  # in place of that one another comes
        state._parts = NONE
    state._handlers["other"].copy_from = broadcast
    kind = pool.error_of(state.resume)[0] if not has_saved else state.resume() or ""
    return kind, model["first"].bias.item(), state.other.bias.item(), state.step


def fail_to_copy(_root: int) -> None:
    raise hvd.RingError("the root has died")


def test_a_saved_state_counts_where_no_rank_has_another() -> None:
    assert pool.run(resume_after_half_a_copy, 2, args=(True,)) == [("", 1.0, 7.0, 7)] * 2


def test_a_part_of_a_state_is_an_error_on_all_ranks() -> None:
    results = pool.run(resume_after_half_a_copy, 2, args=(False,))
    assert [kind for kind, *_ in results] == ["StateLostError"] * 2


class Average:
    """A value with a state, as an average of the weights is."""

    value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


@on_ranks(2)
def test_what_has_a_state_dict_is_saved_and_given() -> None:
    model = model_of(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    average = Average()
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, average=average, step=0)
    assert state.scheduler is scheduler
    assert state.average is average
    optimizer.step()
    scheduler.step()
    average.value = 7.0 + hvd.rank()
    state.commit()
    optimizer.step()
    scheduler.step()
    average.value = 9.0
    state.restore()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.5)
    assert average.value == 7.0 + hvd.rank()
    state.sync()
    assert average.value == 7.0
    assert scheduler.optimizer is optimizer
    schedule = hvd.lr_schedules.WarmupLR(optimizer, warmup=2, scale=3.0)
    state = hvd.elastic.TorchState(schedule=schedule, trained=optimizer)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 9.0
    state.commit()
    state.restore()
    assert optimizer.param_groups[0]["lr"] == rate  # the schedule's, which comes last
    with pytest.raises(ValueError, match="Adasum"):
        hvd.elastic.TorchState(optimizer=hvd.DistributedOptimizer(optimizer, op=hvd.Adasum))


def test_an_attribute_that_holds_a_model_or_an_optimizer_is_refused() -> None:
    model = model_of(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    behind = [SimpleNamespace(first=first, model=model) for first in ("x" * 99_999, lambda: 0)]
    for held in ({"net": model}, [1, (optimizer,)], model.forward, [scheduler], *behind):
        with pytest.raises(ValueError, match="'held' of an elastic state holds a"):
            hvd.elastic.TorchState(model, held=held)
        with pytest.raises(ValueError, match="'held' of an elastic state holds a"):
            hvd.elastic.ObjectState(held=held)
    state = hvd.elastic.TorchState(model, optimizer, held=None)
    with pytest.raises(ValueError, match="'held' of an elastic state holds a SGD"):
        state.held = scheduler
    state.held = {"all": [1, "two", {3.0}]}
    with pytest.raises(ValueError, match="a 'save' of its own"):
        hvd.elastic.ObjectState(save=1)
