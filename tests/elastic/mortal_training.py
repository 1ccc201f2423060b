"""Training whose ranks die at chosen moments, and the weights expected at its end.

Its global batch is the same for any number of ranks, and the weights depend on every sample and on
the order of the batches. Equal weights therefore mean that each batch of each epoch was used once.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import torch_ring as hvd
from torch_ring import checkpoint
from torch_ring.elastic import job as elastic_job
from torch_ring.world import current

SAMPLES, GLOBAL_BATCH = 60, 12  # 12: for 1, 2, 3 and 4 ranks
BATCHES = SAMPLES // GLOBAL_BATCH
WIDTH = 3

# Places where a rank may die, and a surviving rank's number of visits there in an epoch.
IN_A_STEP = {"forward": BATCHES, "bucket": BATCHES, "step": BATCHES, "stepped": BATCHES}
IN_A_STEP |= {"hosts": BATCHES, "commit": 2, "half a commit": 2, "checkpoint": 1}
AFTER_A_DEATH = ["regrouping", "leading", "regrouped", "init", "joined", "resume", "resumed"]
AFTER_A_DEATH += ["callback"]

Plan = Mapping[int, tuple[str, int]]
"""By rank: the place where it dies, and at which of its visits there."""


def random_plan(seed: int, size: int, epochs: int) -> Plan:
    """Return deaths of 1 to all but one ranks, the first of them in a step."""
    chance = random.Random(seed)
    victims = chance.sample(range(size), chance.randint(1, size - 1))
    plan = {}
    for index, victim in enumerate(victims):
        if index and chance.random() < 0.5:
            plan[victim] = chance.choice(AFTER_A_DEATH), 1
        else:
            place = chance.choice(list(IN_A_STEP))
            plan[victim] = place, chance.randint(1, IN_A_STEP[place] * epochs)
    return plan


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is a vector that no sum of others equals."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.values = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


class Network(torch.nn.Module):
    """Three layers, each with a gradient of its own; and the sum of all samples ever used.

    After some epochs the layers no longer depend on early samples; the sum still does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            [torch.ones(WIDTH, dtype=torch.float64) for _ in range(3)]
        )

        self.ledger = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        total = (batch @ self.ledger).mean()
        for index, weight in enumerate(self.weights):
            total = total + ((batch - weight) ** 2).sum(1).mean() * (index + 1)
        return total


def make() -> tuple[Network, torch.optim.Optimizer]:
    model = Network()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def expected(epochs: int) -> list[float]:
    """Return the weights of an uninterrupted training on one rank."""
    return undisturbed(epochs)[0]


def undisturbed(epochs: int) -> tuple[list[float], list[float], list[float]]:
    """Return a training on one rank without deaths.

    Returns:
        The weights, the loss of each batch, and the loss of the same batch after its step.
    """
    model, optimizer = make()
    values = Samples().values
    sampler = hvd.elastic.ElasticSampler(Samples())
    losses, losses_after = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, SAMPLES, GLOBAL_BATCH):
            optimizer.zero_grad()
            batch = values[order[start : start + GLOBAL_BATCH]]
            loss = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            losses_after.append(model(batch).item())
    return weights_of(model), losses, losses_after


def weights_of(model: Network) -> list[float]:
    return [value for weight in (*model.weights, model.ledger) for value in weight.tolist()]


class Reaper:
    """Kills this process at its n-th visit of a place, as planned."""

    def __init__(self, place: str, visit: int) -> None:
        self._place, self._visit = place, visit
        self._visits: Counter[str] = Counter()

    def at(self, place: str) -> None:
        self._visits[place] += 1
        if (place, self._visits[place]) == (self._place, self._visit):
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, before: str, function: Callable[..., Any], after: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.at(before)
            result = function(*args, **kwargs)
            self.at(after)
            return result

        return call

    @contextlib.contextmanager
    def waits(self, state: hvd.elastic.TorchState) -> Iterator[None]:
        """Watch all places outside the training itself, such as commits."""
        places = [
            (elastic_job, "regroup", "regrouping", "regrouped"),
            (elastic_job.ElasticJob, "_serve", "leading", ""),
            (current, "rejoin", "init", "joined"),
            (state, "resume", "resume", "resumed"),
            (state._handlers["model"], "save", "commit", "half a commit"),
            (state, "check_host_updates", "hosts", ""),
            (torch, "save", "", "checkpoint"),
        ]
        with contextlib.ExitStack() as patches:
            for owner, name, before, after in places:
                function = getattr(owner, name)
                call = self.around(before, function, after)
                patches.enter_context(mock.patch.object(owner, name, call))
            yield


def train(
    plan: Plan, epochs: int, folder: str, shard_state: bool = False
) -> tuple[int, list[float]]:
    """Train while ranks die; return the number of survivors, and the weights."""
    reaper = Reaper(*plan.get(hvd.rank(), ("", 0)))
    model, optimizer = make()
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), groups=3, shard_state=shard_state
    )
    # After one of the buckets has been sent, and before another.
    model.weights[1].register_hook(lambda _: reaper.at("bucket"))
    sampler = hvd.elastic.ElasticSampler(Samples())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batches=0)
    state.register_reset_callbacks([lambda: reaper.at("callback")])
    path = Path(folder) / "checkpoint.pt"

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        while state.epoch < epochs:
            loader = torch.utils.data.DataLoader(
                Samples(), GLOBAL_BATCH // hvd.size(), sampler=sampler
            )
            for index, batch in enumerate(loader):
                optimizer.zero_grad()
                reaper.at("forward")
                model(batch).backward()
                reaper.at("step")
                optimizer.step()
                reaper.at("stepped")
                sampler.record_batch(index, len(batch))
                state.batches += 1
                if state.batches % 2:
                    state.check_host_updates()
                else:
                    state.commit()
            sampler.set_epoch(state.epoch + 1)
            state.epoch += 1
            checkpoint.save(path, {"model": model.state_dict(), "epoch": state.epoch})

    with reaper.waits(state):
        go_on(state)
    assert state.batches == epochs * BATCHES
    saved = checkpoint.load(path)
    assert saved["epoch"] == epochs
    for name, value in model.state_dict().items():
        assert torch.equal(saved["model"][name], value)
    return hvd.size(), weights_of(model)
