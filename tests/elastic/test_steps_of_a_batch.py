# SPDX-License-Identifier: Apache-2.0
"""Steps that the state has not recorded yet: no batch is taken twice after a death."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pool
import pytest
import torch
from arrivals import run_with_arrivals
from logs import logged

import torch_ring as hvd

BATCHES = 8
Weights = list[float]


class Training:
    """Two parts trained against one another; the weights reveal every step and its batch.

    Args:
        first_of: makes the optimizer of the first part.
        wrap: makes an optimizer average over the ranks.
        at: called at each place of a batch.
    """

    def __init__(
        self, first_of: Callable[..., Any], wrap: Callable[[Any], Any], at: Callable[[str], None]
    ) -> None:
        self.first, self.second = (torch.nn.Linear(2, 1, dtype=torch.float64) for _ in range(2))
        for parameter in [*self.first.parameters(), *self.second.parameters()]:
            torch.nn.init.constant_(parameter, 0.5)
        self.at = at
        self.optimizer = wrap(first_of(self.first.parameters()))
        self.other = wrap(torch.optim.SGD(self.second.parameters(), lr=0.01, momentum=0.9))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.other, 5)
        self.model = torch.nn.ModuleList([self.first, self.second])

    def loss(self, batch: int, part: int) -> torch.Tensor:
        batch %= BATCHES
        data = torch.tensor([[1.0, batch], [batch % 3, 2.0]], dtype=torch.float64)
        difference = self.first(data) - self.second(data) - batch
        return (difference**2).mean() if part == 0 else (1.5 + difference).cosh().log().sum()

    def step(self, batch: int, part: int) -> torch.Tensor:
        optimizer = (self.optimizer, self.other)[part]
        optimizer.zero_grad()
        loss = self.loss(batch, part)
        self.at(f"pass {part}")
        loss.backward()
        optimizer.step()
        return loss.detach()

    def weights(self) -> Weights:
        return [value for p in self.model.parameters() for value in p.flatten().tolist()]


# --- programs: the steps of a batch, and the moment at which the state records it


def metric_after_step(training: Training, state: Any) -> None:
    while state.batch < BATCHES:
        loss = training.step(state.batch, 0)
        training.at("metric")
        state.total += state.average(loss)
        state.batch += 1
        state.check_host_updates()


def loop_over_the_attribute(training: Training, state: Any) -> None:
    for state.batch in range(state.batch, BATCHES):
        training.step(state.batch, 0)
        state.seen += 2  # does not record where to begin
        training.at("check")
        state.check_host_updates()


def several_steps(training: Training, state: Any) -> None:
    """A Wasserstein GAN: three steps of the critic, and one of the generator."""
    while state.batch < BATCHES:
        for _ in range(3):
            training.step(state.batch, 0)
        training.step(state.batch, 1)
        state.batch += 1


def scheduler_and_metric(training: Training, state: Any) -> None:
    while state.batch < BATCHES:
        loss = training.step(state.batch, 1)
        state.scheduler.step()
        training.at("metric")
        state.average(loss)
        state.batch += 1


def progress_in_place(training: Training, state: Any) -> None:
    while state.progress["batch"] < BATCHES:
        loss = training.step(state.progress["batch"], 0)
        training.at("metric")
        state.average(loss)
        state.progress["batch"] += 1


def until_one_comes(training: Training, state: Any) -> None:
    for state.batch in itertools.count(state.batch):
        if state.batch == state.end:
            return
        training.step(state.batch, 0)
        training.step(state.batch, 0)
        state.seen += 2
        state.check_host_updates()


def closures(training: Training, state: Any) -> None:
    while state.batch < BATCHES:

        def closure() -> torch.Tensor:
            training.optimizer.zero_grad()
            loss = training.loss(state.batch, 0)
            training.at("pass 0")
            loss.backward()
            return loss

        training.optimizer.step(closure)
        training.at("metric")
        state.average(torch.zeros(1))
        state.batch += 1


def first_of(program: Callable[..., None]) -> Callable[..., Any]:
    if program is closures:
        return functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=4, history_size=3)
    return functools.partial(torch.optim.Adam, lr=0.1)


def expected(program: Callable[..., None], end: int = -1) -> Weights:
    """Return the weights of one uninterrupted process."""
    training = Training(first_of(program), lambda optimizer: optimizer, lambda _: None)
    state = SimpleNamespace(batch=0, seen=0, total=0.0, progress={"batch": 0}, end=end)
    state.scheduler, state.average = training.scheduler, lambda loss: loss.item()
    state.check_host_updates = lambda: None
    program(training, state)
    return training.weights()


def train(program: Callable[..., None], victim: int, place: str, visit: int) -> Any:
    """Train; a rank dies at its `visit`-th visit of a place.

    Returns:
        The weights, the number of ranks, the batches that were begun, the last one, and the log.
    """
    name, visits = os.environ.get("TORCH_RING_PROCESS", f"p{hvd.rank()}"), Counter[str]()
    begun: list[int] = []

    def at(where: str) -> None:
        visits[where] += 1
        if where == "pass 0":
            begun.append(state.progress["batch"] if program is progress_in_place else state.batch)
        if (name, where, visits[where]) == (f"p{victim}", place, visit):
            os.kill(os.getpid(), signal.SIGKILL)

    training = Training(first_of(program), hvd.DistributedOptimizer, at)
    state = hvd.elastic.TorchState(
        training.model,
        training.optimizer,
        other=training.other,
        scheduler=training.scheduler,
        batch=0,
        seen=0,
        total=0.0,
        progress={"batch": 0},
        end=-1,
    )
    if program is until_one_comes:
        state.register_reset_callbacks([lambda: setattr(state, "end", state.batch + 3)])
    object.__setattr__(state, "average", lambda loss: hvd.allreduce(loss).item())
    with logged() as lines:
        hvd.elastic.run(lambda state: program(training, state))(state)
    return training.weights(), hvd.size(), begun, state.end, lines


def check(program: Callable[..., None], size: int, transport: str, *plan: Any) -> Any:
    """Check the weights after a rank's death; return the first survivor's result."""
    results = pool.run(train, size, args=(program, *plan), transport=transport, may_die=[plan[0]])
    survivors = [result for result in results if result is not None]
    assert len(survivors) == size - 1
    for weights, left, *_ in survivors:
        assert left == size - 1
        assert weights == survivors[0][0]
        assert weights == pytest.approx(expected(program), rel=1e-9)
    return survivors[0]


@pytest.mark.parametrize(
    ("transport", "program", "victim", "place", "visit"),
    [
        ("shm", metric_after_step, 1, "metric", 4),
        ("tcp", loop_over_the_attribute, 1, "check", 3),
        ("tcp", several_steps, 0, "pass 0", 6),
        ("shm", scheduler_and_metric, 1, "metric", 4),
        ("tcp", progress_in_place, 1, "metric", 5),
        ("shm", closures, 1, "pass 0", 6),
    ],
)
def test_no_step_is_taken_twice_and_no_batch_is_lost(
    transport: str, program: Callable[..., None], victim: int, place: str, visit: int
) -> None:
    _, _, begun, *_ = check(program, 3, transport, victim, place, visit)
    again = [batch for batch, after in itertools.pairwise(begun) if after < batch]
    assert again == []  # only this batch is begun again


def test_what_the_log_of_survivors_says() -> None:
    *_, lines = check(metric_after_step, 2, "shm", 1, "metric", 4)
    (told,) = [line for line in lines if "repeats the batch" in line]
    assert told.startswith("1 step of 'optimizer' was taken already that the state does not show")
    (goes_on,) = [line for line in lines if " on, of 2, after " in line]
    assert goes_on.startswith("1 rank goes on, of 2, after ")
    assert "Call shutdown()" not in goes_on
    *_, lines = check(metric_after_step, 2, "tcp", 0, "pass 0", 4)
    assert not any("again" in line or "repeats the batch" in line for line in lines)


def test_no_step_is_taken_twice_when_a_process_comes() -> None:
    results = run_with_arrivals(train, 2, 1, args=(until_one_comes, -1, "", 0))
    _, _, begun, end, _ = results[0]
    assert {size for _, size, *_ in results} == {3}
    assert all(weights == results[0][0] for weights, *_ in results)
    assert results[0][0] == pytest.approx(expected(until_one_comes, end), rel=1e-9)
    assert begun == sorted(begun)
    counts = Counter(begun)
    assert set(counts) == set(range(end))
    assert sorted(counts.values())[-2] == 2  # only one batch was done again
