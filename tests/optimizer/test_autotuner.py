# SPDX-License-Identifier: Apache-2.0
"""Autotuner: a model of a step chooses bucket sizes, which all ranks try in turns, and keep only
if they win."""

from __future__ import annotations

import csv
import logging

import pytest
import torch
from logs import logged
from pool import run
from training import take_step

import torch_ring as hvd
from torch_ring.optimizer import autotuner
from torch_ring.optimizer.autotuner import Autotuner, BucketLimits, Transfer, exposed_s, predict
from torch_ring.optimizer.buckets import TensorSpec, plan_buckets

MIB = 1 << 20
DEFAULT = BucketLimits(25 * MIB)
COUNT = 16


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class SlowNetwork:
    """An engine whose allreduces leave their inputs unchanged, and take time on a fake clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.names: list[str] = []

    def run(self, collective, tensor, output, name, root, op):
        assert collective == "allreduce"
        assert tensor is output
        self.names.append(name)
        self.clock.now += 1e-5 + tensor.numel() * tensor.itemsize / (10 * MIB)


class SlowPeer(SlowNetwork):
    """The same, with another rank, whose steps take 4 s with other buckets than the default."""

    def run(self, collective, tensor, output, name, root, op):
        super().run(collective, tensor, output, name, root, op)
        if op == hvd.Max and tensor[0] > 1.0:  # the steps, and not the two allreduces
            tensor.copy_(torch.maximum(tensor, torch.tensor([3.0, 4.0])))


class Job:
    """A model whose buckets determine the time of its passes."""

    def __init__(self, monkeypatch, tmp_path, pass_s, network=SlowNetwork) -> None:
        self.clock = Clock()
        monkeypatch.setattr(autotuner, "time", self.clock)
        self.network = network(self.clock)
        self.limits = DEFAULT
        self.pass_s = pass_s
        self.parameters = [torch.zeros(1, requires_grad=True) for _ in range(COUNT)]
        specs = [TensorSpec(MIB // 4, torch.float32, torch.device("cpu"))] * COUNT
        self.rebuilt: list[BucketLimits] = []
        self.log = tmp_path / "tuned.csv"

        def plan_of(limits):
            return plan_buckets(
                specs, range(COUNT - 1, -1, -1), limits.capacity_bytes, limits.last_bytes
            )

        self.tuner = Autotuner(
            self.network,
            "tuning",
            self.parameters,
            DEFAULT,
            plan_of=plan_of,
            rebuild=self.rebuild,
            tells=True,
            log_path=str(self.log),
        )

    def rebuild(self, limits: BucketLimits) -> None:
        self.limits = limits
        self.rebuilt.append(limits)
        self.clock.now += 50.0  # counts for no pass

    def train(self, passes: int) -> None:
        for _ in range(passes):
            began = self.clock.now
            for parameter in reversed(self.parameters):
                parameter.sum().backward()
                self.clock.now += 0.1
            self.clock.now = began + self.pass_s(self.limits)
            self.tuner.pass_ended()


def test_limits_that_win_stay(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "torch_ring")
    job = Job(monkeypatch, tmp_path, lambda limits: 3.0 if limits == DEFAULT else 2.0)
    job.train(25)
    assert job.tuner.is_done
    assert job.limits != DEFAULT
    assert [each == DEFAULT for each in job.rebuilt] == [False, True, False, False]
    assert "replace those of 25 MiB" in caplog.text
    assert "takes 2000 ms, not 3000" in caplog.text
    with job.log.open() as file:
        rows = list(csv.DictReader(file))
    tried = {row["bucket_bytes"]: float(row["step_s"]) for row in rows if row["step_s"]}
    assert tried == {str(25 * MIB): 3.0, str(job.limits.capacity_bytes): 2.0}
    assert len(rows) > 20
    job.train(3)
    assert len(job.rebuilt) == 4


@pytest.mark.parametrize(
    ("other_s", "network"), [(2.0, SlowPeer), (2.999, SlowNetwork)], ids=["on one rank alone", ""]
)
def test_limits_that_do_not_win_go(monkeypatch, tmp_path, caplog, other_s, network):
    caplog.set_level(logging.INFO, "torch_ring")
    job = Job(monkeypatch, tmp_path, lambda limits: 3.0 if limits == DEFAULT else other_s, network)
    job.train(25)
    assert job.tuner.is_done
    assert job.limits == DEFAULT
    assert "do not replace" in caplog.text


def test_nothing_is_tried_where_nothing_is_to_be_gained(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "torch_ring")
    monkeypatch.setattr(SlowNetwork, "run", lambda *_: None)  # takes no time
    job = Job(monkeypatch, tmp_path, lambda _: 2.0)
    job.train(5)
    assert job.tuner.is_done
    assert not any(map(bool, [len(p._post_accumulate_grad_hooks or ()) for p in job.parameters]))
    assert "stay" in caplog.text
    assert job.log.exists()


def test_a_tuner_that_is_stopped_goes_back(monkeypatch, tmp_path):
    for passes in (2, 12, 25):
        job = Job(monkeypatch, tmp_path, lambda limits: 3.0 if limits == DEFAULT else 2.0)
        job.train(passes)
        job.tuner.stop()
        assert job.limits == DEFAULT
        job.train(30)
        assert job.limits == DEFAULT


# --- the model of a step

SPECS = [TensorSpec(MIB // 4, torch.float32, torch.device("cpu"))] * 32  # 1 MiB each
READY_S = [(31 - index) / 31 for index in range(32)]  # one after the other, the last one first
SMALL_LAST = BucketLimits(25 * MIB, MIB)


def plan_of(limits):
    return plan_buckets(SPECS, range(31, -1, -1), limits.capacity_bytes, limits.last_bytes)


def test_a_slow_network_wants_small_buckets_and_a_late_one_large_ones():
    def best(transfer):
        predicted = predict(SMALL_LAST, plan_of, READY_S, transfer)
        return min(predicted.items(), key=lambda each: each[1])

    network = Transfer(1e-5, 40 * MIB)  # 32 MiB in 0.8 s: sending should begin early
    limits, left_s = best(network)
    assert limits.capacity_bytes < 8 * MIB
    assert left_s < exposed_s(plan_of(SMALL_LAST), READY_S, network) / 2
    limits, left_s = best(Transfer(1.0, 1e12))  # a bucket costs a second: two are the fewest
    assert len(plan_of(limits)) == 2
    assert left_s == pytest.approx(15 / 31 + 2 - 1, abs=1e-3)


# --- real ranks


def train(passes_of_rank: list[int]) -> tuple[bool, list[int], bytes]:
    """Train; return whether there is a tuner, the sizes of buckets, and the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    torch.manual_seed(1 + hvd.rank())

    def take_steps(count: int) -> None:
        for _ in range(count):
            take_step(optimizer, model(torch.randn(4, 96)).square().sum())

    take_steps(passes_of_rank[hvd.rank()])
    if len(set(passes_of_rank)) > 1:
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        take_steps(3)
    layout = optimizer._reducer.layout
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return layout.tuner is not None, [bucket.numel for bucket in layout.plan], weights


SMALL = {"TORCH_RING_BUCKET_BYTES": "50000"}
AUTOTUNE = SMALL | {"TORCH_RING_AUTOTUNE": "1"}


def test_ranks_tune_alike_and_train_the_same(tmp_path):
    log = tmp_path / "tuned.csv"
    env = AUTOTUNE | {"TORCH_RING_AUTOTUNE_LOG": str(log)}
    tuned = run(train, 3, args=([30] * 3,), transport="tcp", env=env)
    plain = run(train, 3, args=([30] * 3,), transport="tcp", env=SMALL)
    assert tuned[0] == tuned[1] == tuned[2]
    assert tuned[0][2] == plain[0][2]
    assert (tuned[0][0], plain[0][0]) == (True, False)
    assert log.exists()


def train_and_listen() -> list[str]:
    logging.getLogger("torch_ring").setLevel("INFO")
    with logged() as lines:
        train([10] * hvd.size())
    return [line for line in lines if "autotune" in line]


def test_on_one_host_rank_0_says_that_there_is_nothing_to_tune():
    first, second = run(train_and_listen, 2, env=AUTOTUNE)
    assert first == [
        "autotune: the buckets stay: all ranks are on one host, where gradients are reduced when "
        "backward has ended"
    ]
    assert second == []


@pytest.mark.parametrize("passes", [[3, 40], [40, 12]], ids=str)
def test_a_rank_that_joins(passes):
    """It misses passes of the trial; when all train again, all have the initial buckets."""
    first, second = run(train, 2, args=(passes,), transport="tcp", env=AUTOTUNE)
    assert first[1:] == second[1:]
    assert max(first[1]) * 4 <= 50_000
