# SPDX-License-Identifier: Apache-2.0
"""Training whose ranks die at chosen moments, and the weights expected at its end.

Its global batch is the same for any number of ranks, and the weights depend on every sample and on
the order of the batches. Equal weights therefore mean that each batch of each epoch was used once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pool import error_of
from process_set_use import check_process_set, sum_of_ranks

import torch_ring as hvd
from torch_ring import checkpoint
from torch_ring.elastic import job as elastic_job
from torch_ring.setup import host_socket
from torch_ring.world import current, join
from torch_ring.world.engine import EngineExchange

SAMPLES, GLOBAL_BATCH = 60, 12  # 12: for 1, 2, 3 and 4 ranks
BATCHES = SAMPLES // GLOBAL_BATCH
WIDTH = 3
AT_ONCE = 3  # samples of a rank in a pass: 1, 2, 2 and 4 passes of 4, 3, 2 ranks and 1

KINDS = ("plain", "sharded", "in passes")
"""Kinds of optimizers: with shard_state=True; with several backward passes a step, so that fewer
ranks take a batch of the same size."""

# Places where a rank may die, and a surviving rank's number of visits there in an epoch.
IN_A_STEP = {"forward": BATCHES, "bucket": BATCHES, "step": BATCHES, "stepped": BATCHES}
IN_A_STEP |= {"hosts": BATCHES, "commit": 2, "half a commit": 2, "checkpoint": 1}
IN_A_SHARDED_STEP = ["in its part", "after its part"]  # while others take theirs
AFTER_A_DEATH = ["regrouping", "leading", "regrouped", "init", "joined", "resume", "resumed"]
AFTER_A_DEATH += ["callback", "sets", "sets made", "arriving", "arrived", "told"]

SETS = {1: [], 2: [[0], [1]], 3: [[1, 2], [0, 2], [1]], 4: [[1, 2], [0, 1, 2], [2], [0, 3]]}
"""Process sets of worlds of these sizes."""

Plan = Mapping[int, tuple[str, int]]
"""By rank: the place where it dies, and at which of its visits there."""


def random_plan(chance: random.Random, size: int, victims: Collection[int]) -> Plan:
    """Return places for ranks of the first world, the first of them in a step."""
    plan = {}
    for index, victim in enumerate(victims):
        if index and chance.random() < 0.5:
            plan[victim] = chance.choice(AFTER_A_DEATH), 1
        elif victim < size:
            place = chance.choice(list(IN_A_STEP))
            plan[victim] = place, chance.randint(1, 3 * IN_A_STEP[place])
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
    model, optimizer = make()
    values = Samples().values
    sampler = hvd.elastic.ElasticSampler(Samples())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, SAMPLES, GLOBAL_BATCH):
            optimizer.zero_grad()
            model(values[order[start : start + GLOBAL_BATCH]]).backward()
            optimizer.step()
    return weights_of(model)


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
    def waits(self, state: hvd.elastic.TorchState, shards: Any) -> Iterator[None]:
        """Watch all places outside the training itself, such as commits."""
        places = [
            (elastic_job, "regroup", "regrouping", "regrouped"),
            (elastic_job.ElasticJob, "_serve", "leading", ""),
            (current, "rejoin", "init", "joined"),
            (join, "meet_on_host", "arriving", ""),
            (join, "exchange_hosts", "arrived", "told"),
            (EngineExchange, "numbers", "sets", "sets made"),
            (state, "resume", "resume", "resumed"),
            (state._handlers["model"], "save", "commit", "half a commit"),
            (state._handlers["optimizer"], "copy_from", "half a copy", ""),
            (state, "check_host_updates", "hosts", ""),
            (torch, "save", "", "checkpoint"),
            *[(shards, "_groups", "in its part", ""), (shards, "_leave", "after its part", "")],
        ][: None if shards else -2]
        with contextlib.ExitStack() as patches:
            for owner, name, before, after in places:
                function = getattr(owner, name)
                call = self.around(before, function, after)
                patches.enter_context(mock.patch.object(owner, name, call))
            yield


class Sets:
    """Process sets of the first world: whole ones are made again, and others have lost a rank."""

    def __init__(self) -> None:
        names = SETS[hvd.size()]  # a newcomer has none
        self._sets = [(ranks, hvd.add_process_set(ranks)) for ranks in names]
        self._living: list[int] = []

    def note_world(self, name: int) -> None:
        self._living = hvd.allgather_object(name)

    def check(self) -> None:
        for names, process_set in self._sets:
            if not {*names} <= {*self._living}:
                assert error_of(process_set.included)[0] == "ProcessSetLostError"
                continue
            ranks = sorted(map(self._living.index, names))
            assert process_set.ranks == ranks
            assert process_set.included() == (hvd.rank() in ranks)
            if process_set.included():
                assert sum_of_ranks(process_set) == sum(ranks)


def require_one_table() -> None:
    """Newcomers know the sets of the others, and can make more with them."""
    table = hvd._basics._get_process_set_ids_and_ranks()
    assert hvd.allgather_object(table) == [table] * hvd.size()
    ends = hvd.add_process_set([0, hvd.size() - 1])
    check_process_set(ends, [0, hvd.size() - 1])
    assert hvd.remove_process_set(ends)


class Worlds:
    """All worlds that this process has been in: those that have ended are gone, without help."""

    def __init__(self) -> None:
        gc.collect()
        gc.disable()
        self._engines: list[weakref.ref[Any]] = []

    def note(self) -> None:
        if not self._engines or self._engines[-1]() is not current.engine():
            self._engines.append(weakref.ref(current.engine()))

    def require_present_only(self) -> None:
        *ended, _ = [engine() for engine in self._engines]
        gc.enable()
        assert ended == [None] * len(ended), "an ended world is left"


def train(
    plan: Plan, epochs: int, folder: str, kind: str, stay: Collection[int] = ()
) -> tuple[int, int, int, list[float]]:
    """Train while ranks die and come.

    Args:
        plan: where processes die.
        epochs: to train, counted from the epoch in which there are all of `stay` and no others.
        kind: of the optimizer.
        stay: the processes that do not die, if some come after the start.

    Returns:
        The rank, the size, the number of epochs and the weights.
    """
    # A wait for a dead rank until the deadline ends the test: a leader does not go on without it
    # after a moment. It does tell late ranks of a failure for a moment: one that lives may have
    # failed without the others, and not come.
    os.environ["TORCH_RING_INIT_TIMEOUT"] = "3600"
    current._REJOIN_S = host_socket._GRACE_S = 1800.0
    name = int(os.environ.get("TORCH_RING_PROCESS", f"p{hvd.rank()}")[1:])
    reaper, worlds = Reaper(*plan.get(name, ("", 0))), Worlds()

    def passes() -> int:
        return -(-GLOBAL_BATCH // hvd.size() // AT_ONCE) if kind == "in passes" else 1

    model, optimizer = make()
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        groups=3,
        shard_state=kind == "sharded",
        backward_passes_per_step=passes(),
    )
    now = 0  # the pass of the step
    # After one of the buckets has been sent, and before another, if this pass sends any.
    model.weights[1].register_hook(lambda _: reaper.at("a later pass" if now else "bucket"))
    sampler = hvd.elastic.ElasticSampler(Samples())
    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, epoch=0, batches=0, end=-1 if stay else epochs
    )
    state.register_reset_callbacks([lambda: optimizer.set_backward_passes_per_step(passes())])
    state.register_reset_callbacks([lambda: reaper.at("callback")])
    path, sets = Path(folder) / "checkpoint.pt", Sets()

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        nonlocal now
        worlds.note()
        sets.note_world(name)
        while state.epoch != state.end:
            loader = torch.utils.data.DataLoader(
                Samples(), GLOBAL_BATCH // hvd.size(), sampler=sampler
            )
            for index, batch in enumerate(loader):
                optimizer.zero_grad()
                sets.check()
                reaper.at("forward")
                for now, part in enumerate(batch.tensor_split(passes())):
                    (model(part) / passes()).backward()
                    if now == 0 and passes() > 1:  # nothing is averaged yet
                        assert model.ledger.grad is not None
                        torch.testing.assert_close(model.ledger.grad, part.mean(0) / passes())
                reaper.at("step")
                optimizer.step()
                reaper.at("stepped")
                sampler.record_batch(index, len(batch))
                state.batches += 1
                if state.batches % 2:
                    state.check_host_updates()
                else:
                    state.commit()
            if state.end < 0 and {*hvd.allgather_object(name)} == {*stay}:
                state.end = state.epoch + epochs
                if hvd.size() > 2:
                    require_one_table()
            sampler.set_epoch(state.epoch + 1)
            state.epoch += 1
            checkpoint.save(path, {"model": model.state_dict(), "epoch": state.epoch})

    with reaper.waits(state, optimizer._shards if kind == "sharded" else None):
        reaper.at("before")
        go_on(state)
    worlds.require_present_only()
    if kind == "sharded" and hvd.size() > 1:
        assert optimizer._shards.is_shared  # by the ranks of each host
        assert len(optimizer._shards._owners) == hvd.local_size()
    assert stay or state.epoch == epochs
    assert state.batches == state.epoch * BATCHES
    saved = checkpoint.load(path)
    assert saved["epoch"] == state.epoch
    for key, value in model.state_dict().items():
        assert torch.equal(saved["model"][key], value)
    return hvd.rank(), hvd.size(), state.epoch, weights_of(model)
