# SPDX-License-Identifier: Apache-2.0
"""ScaledLR: one process's schedule on any number of ranks, and on others after a resume."""

from __future__ import annotations

import copy
import gc
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arrivals import run_with_arrivals
from logs import logged
from on_ranks import on_ranks
from pool import run
from scripts import ROOT
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import mse_loss
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import torch_ring as hvd
from torch_ring import checkpoint
from torch_ring.data import ShardedSampler
from torch_ring.lr_schedules import ScaledLR, WarmupLR

SAMPLES, BATCH, EPOCHS = 512, 32, 6
STEPS = EPOCHS * SAMPLES // BATCH  # of one rank

Make = Callable[[SGD, int], lr_scheduler.LRScheduler]

KINDS: dict[str, Make] = {
    "cosine": lambda o, n: lr_scheduler.CosineAnnealingLR(o, n),
    "one cycle": lambda o, n: lr_scheduler.OneCycleLR(o, 0.3, n),
    "warm restarts": lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, n // 3),
    "cyclic": lambda o, n: lr_scheduler.CyclicLR(o, 0.1, 0.4, n // 5),
    "steps": lambda o, n: lr_scheduler.StepLR(o, n // 4, 0.5),
    "linear": lambda o, n: lr_scheduler.LinearLR(o, 0.1, 1.0, n // 2),
    "lambda": lambda o, n: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step / n)),
    "multiplicative": lambda o, n: lr_scheduler.MultiplicativeLR(o, lambda _: 0.5 ** (1 / n)),
    "in turn": lambda o, n: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 8), lr_scheduler.CosineAnnealingLR(o, n - 8)], [8]
    ),
    "one cycle in turn": lambda o, n: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 9), lr_scheduler.OneCycleLR(o, 0.3, n - 8)], [8]
    ),
    "one cycle together": lambda o, n: lr_scheduler.ChainedScheduler(
        [lr_scheduler.OneCycleLR(o, 0.3, n), lr_scheduler.ConstantLR(o, 0.5, n // 2)], o
    ),
}


def rates_of_one(make: Make, rate: float = 0.1) -> list[float]:
    """Return the rates of one process before each of its steps, and after the last one."""
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=rate, momentum=0.9)
    scheduler, rates = make(optimizer, STEPS), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


def everything(path: Path, begin: int, end: int) -> None:
    """Step all kinds of schedulers, from a checkpoint or from the beginning."""
    size = hvd.size()
    states = checkpoint.load(path, default={})
    for number, (kind, make) in enumerate(KINDS.items()):
        optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        scheduler = ScaledLR(make(optimizer, STEPS), BATCH)
        of_one = rates_of_one(make)
        if begin:
            parts = [(optimizer, "optimizer"), (scheduler, "scheduler")]
            for part, name in parts if number % 2 else reversed(parts):
                part.load_state_dict(states[kind][name])
        for step in range(begin, end, size):
            rate = optimizer.param_groups[0]["lr"]
            assert rate == pytest.approx(size * of_one[step]), (kind, step)
            assert scheduler.get_last_lr() == [rate]
            optimizer.step()
            scheduler.step(BATCH)
        assert scheduler.samples == end * BATCH
        states[kind] = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        if end == STEPS and "one cycle" in kind:  # samples that a sampler repeats are no step
            rate = optimizer.param_groups[0]["lr"]
            scheduler.step(9 * BATCH)
            assert scheduler.get_last_lr() == [rate]
    checkpoint.save(path, states)


def test_every_kind_of_schedule(tmp_path):
    run(everything, 2, args=(tmp_path / "states", 0, 48))
    run(everything, 3, args=(tmp_path / "states", 48, STEPS))


# --- counting


def optimizer_of(rate: Any = 0.1, **options: Any) -> Any:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=rate)
    return hvd.DistributedOptimizer(optimizer, [("weight", weight)], **options)


def train(optimizer: Any, passes: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(passes):
        optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()


@on_ranks(2)
def test_samples_of_all_ranks_are_counted() -> None:
    optimizer = optimizer_of(backward_passes_per_step=3)
    scheduler = ScaledLR(lr_scheduler.ExponentialLR(optimizer, 0.5), 8)
    train(optimizer, 3)
    scheduler.step()  # three passes on two ranks
    assert scheduler.samples == 3 * 2 * 8
    assert scheduler.get_last_lr() == [pytest.approx(2 * 0.1 * 0.5**6)]
    train(optimizer, 3)
    scheduler.step(3)  # not a whole step of the schedule yet
    assert scheduler.get_last_lr() == [pytest.approx(2 * 0.1 * 0.5**6)]
    train(optimizer, 3)
    scheduler.step(1)
    assert scheduler.get_last_lr() == [pytest.approx(2 * 0.1 * 0.5**7)]

    optimizer = optimizer_of()
    scheduler = ScaledLR(lr_scheduler.OneCycleLR(optimizer, 1.0, 4), 8)
    for _ in range(3):  # two samples more than the schedule's 32, as samplers may repeat some
        train(optimizer)
        scheduler.step(6 if scheduler.samples else 8)
        assert 0 < optimizer.param_groups[0]["lr"] <= 2.0
    assert scheduler.samples == 40

    optimizer = optimizer_of()
    scheduler = ScaledLR(lr_scheduler.StepLR(optimizer, 2), scale=math.sqrt)  # once an epoch
    for _ in range(3):
        train(optimizer)
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(2**0.5 * 0.01)]


@on_ranks(2)
def test_plateaus_and_changes_by_hand() -> None:
    optimizer = optimizer_of()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.02)
    scheduler = ScaledLR(plateau)
    rates = []
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        train(optimizer)
        scheduler.step(value)
        rates += scheduler.get_last_lr()
    assert rates == pytest.approx([2 * rate for rate in (0.1, 0.05, 0.025, 0.02, 0.02)])

    # A plateau beside a schedule, and a change by hand.
    optimizer = optimizer_of(torch.tensor(0.1))
    scheduler = ScaledLR(lr_scheduler.ExponentialLR(optimizer, 0.5), 8)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    plateau.step(1.0)
    plateau.step(2.0)
    train(optimizer)
    scheduler.step(8)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(2 * 0.1 * 0.5 * 0.25)
    state = scheduler.state_dict()
    optimizer.param_groups[0]["lr"].fill_(7.0)
    scheduler.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(2 * 0.1 * 0.5 * 0.25)


# --- rates without a note of their factor are those of one rank


class Plain(SGD):
    """Calls none of torch's hooks in load_state_dict(), as bitsandbytes' optimizers."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({**saved, "params": group["params"]})


class Delegating(torch.optim.Optimizer):
    """Does not call torch's __init__()."""

    def __init__(self, inner: SGD) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


def taken(optimizer: Any) -> list[float]:
    """Step with gradients of 1, and return how far the parameters have gone."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [parameter[0].item() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moves = [b - p[0].item() for b, p in zip(before, parameters, strict=True)]
    return [pytest.approx(move, abs=1e-6) for move in moves]


def scaled(optimizer: Any, **options: Any) -> tuple[Any, ScaledLR]:
    return optimizer, ScaledLR(lr_scheduler.StepLR(optimizer, 10), 8, **options)


def new(rate: Any = 0.1, kind: type[SGD] = SGD) -> SGD:
    return kind([torch.nn.Parameter(torch.ones(2))], lr=rate)


@on_ranks(2)
def test_added_groups_are_scaled() -> None:
    for kind in (float, torch.tensor):
        one, scheduler = scaled(optimizer_of(kind(0.1)))
        one.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        other, loaded = scaled(optimizer_of(kind(0.1)))
        other.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        loaded.load_state_dict(scheduler.state_dict())  # before any step
        assert [float(lr) for lr in scheduler.get_last_lr()] == pytest.approx([0.2, 0.2])
        for each in (one, other):
            assert taken(each) == [0.2, 0.2]
    history = scheduler.get_last_lr()
    scheduler.step(5 * 8)
    assert history == [pytest.approx(0.2)] * 2  # copies
    assert scheduler.get_last_lr() == [pytest.approx(0.02)] * 2
    with pytest.raises(ValueError, match="2 groups of parameters, and this one has 1"):
        scaled(new())[1].load_state_dict(scheduler.state_dict())


@on_ranks(2)
def test_states_of_other_ranks_and_of_plain_schedulers_in_any_order() -> None:
    optimizer = new()
    plain = lr_scheduler.StepLR(optimizer, 10)
    for _ in range(25):
        optimizer.step()
        plain.step()
    states = copy.deepcopy((optimizer.state_dict(), plain.state_dict()))
    for first in (True, False):  # from one rank, without ScaledLR
        optimizer = new()
        schedule = lr_scheduler.StepLR(optimizer, 10)
        schedule.load_state_dict(states[1])
        if first:
            optimizer.load_state_dict(states[0])
        scheduler = ScaledLR(schedule, 8)
        if not first:
            optimizer.load_state_dict(states[0])
        assert taken(optimizer) == [0.002]
        scheduler.step(3 * 8)  # steps 26 to 31
        assert taken(optimizer) == [0.0002]

        optimizer = new()
        optimizer.load_state_dict(states[0])
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, 100, last_epoch=25)
        rate = optimizer.param_groups[0]["lr"]
        ScaledLR(cosine, 8)
        assert optimizer.param_groups[0]["lr"] == 2 * rate

        of_four = [part.state_dict() for part in scaled(new(0.1, Plain), scale=lambda _: 4)]
        for wrap in (hvd.DistributedOptimizer, lambda optimizer: optimizer):
            parts = scaled(wrap(new(0.1, Plain)))
            pairs = list(zip(parts, of_four, strict=True))
            for part, state in pairs if first else reversed(pairs):
                part.load_state_dict(state)
            assert taken(parts[0]) == [0.2]
        gone, _ = scaled(new())
        del _
        gc.collect()
        gone.load_state_dict(of_four[0])
        assert gone.param_groups[0]["lr"] == 0.2  # right at once, and without its ScaledLR


@on_ranks(2)
def test_the_ranks_are_those_of_the_optimizer() -> None:
    alone = [hvd.add_process_set([rank]) for rank in range(2)][hvd.rank()]
    optimizer, scheduler = scaled(new())  # before it is wrapped
    hvd.DistributedOptimizer(optimizer, process_set=alone)
    assert taken(optimizer) == [0.1]
    scheduler.step(8)
    assert scheduler.samples == 8
    optimizer, _ = scaled(hvd.DistributedOptimizer(new(), process_set=alone))
    assert optimizer.param_groups[0]["lr"] == 0.1
    both, _ = scaled(optimizer_of(), process_set=alone)
    assert both.param_groups[0]["lr"] == 0.1
    optimizer = hvd.DistributedOptimizer(new(), process_set=alone)
    _, scheduler = scaled(hvd.LocalSGD(optimizer), scale=lambda _: 1)
    scheduler.step(8)
    assert scheduler.samples == 16  # of all ranks
    odd, scheduler = scaled(hvd.DistributedOptimizer(Delegating(new()), process_set=alone))
    assert taken(odd) == [0.1]
    assert (scheduler.last_epoch, scheduler.base_lrs) == (0, [0.1])
    copied = copy.deepcopy(scaled(new())[1])
    copied.step(8)
    assert (copied.last_epoch, copied.get_last_lr()) == (2, [0.2])

    optimizer, scheduler = scaled(optimizer_of())
    for _ in range(1 + hvd.rank()):
        train(optimizer)
        scheduler.step(8)
    last = hvd.join()
    scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank=last))
    assert scheduler.samples == 2 * 16


@on_ranks(2)
def test_dcp_reads_checkpoints_of_plain_optimizers(tmp_path: Path) -> None:
    def trained(*, wrap: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer)
        model(torch.full((2,), hvd.size() - wrap * 1.0)).sum().backward()
        optimizer.step()
        return model, optimizer

    def average(optimizer: torch.optim.Optimizer) -> Any:
        return optimizer.state_dict()["state"][0]["exp_avg"].tolist()

    plain = trained(wrap=False)
    if hvd.rank() == 0:
        for name, state in (("a", plain[1].state_dict()), ("b", get_optimizer_state_dict(*plain))):
            dcp.save({"optimizer": state}, checkpoint_id=tmp_path / name, no_dist=True)
    hvd.barrier()
    planner = DefaultLoadPlanner(allow_partial_load=True)
    for name, more in (("a", {"planner": planner}), ("b", {})):
        model, optimizer = trained(wrap=True)
        assert average(optimizer) != average(plain[1])
        own = optimizer.state_dict() if more else get_optimizer_state_dict(model, optimizer)
        state = {"optimizer": own}
        dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True, **more)
        if more:
            optimizer.load_state_dict(state["optimizer"])
        else:
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert average(optimizer) == average(plain[1])


# --- another number of ranks within a job


Steps = list[tuple[int, float, float]]
"""Of each step: the number of ranks, its rate, and the rate that is right for them."""


def change(end: int) -> tuple[int, Steps]:
    """Train until so many steps after a change of the ranks; return samples and steps."""
    optimizer = optimizer_of()
    scheduler = ScaledLR(lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (10 + step)), BATCH)
    steps: Steps = []

    def note(stepping: Any, *_: Any) -> None:
        right = hvd.size() * 0.1 / (10 + scheduler.samples // BATCH)
        steps.append((hvd.size(), stepping.param_groups[0]["lr"], right))

    optimizer.register_step_post_hook(note)

    @hvd.elastic.run
    def training(state: Any) -> None:
        while state.left > 0 and state.batch < 1000:  # the batch is the place of the training
            optimizer.zero_grad()
            optimizer.param_groups[0]["params"][0].sum().backward()
            optimizer.step()
            scheduler.step(BATCH)
            state.batch += 1
            state.left -= hvd.size() != state.size
            state.check_host_updates()

    state = hvd.elastic.TorchState(
        optimizer=optimizer, scheduler=scheduler, batch=0, left=end, size=hvd.size()
    )
    training(state)
    return scheduler.samples, steps


def test_rates_follow_the_ranks_when_one_comes():
    *ended, (samples, of_newcomer) = run_with_arrivals(change, 2, 1, args=(10,))
    steps = ended[0][1]
    assert ended == [(samples, steps)] * 2
    assert [size for size, _, _ in steps[-10:]] == [3] * 10
    assert {size for size, _, _ in steps[:-10]} == {2}
    assert [rate for _, rate, _ in steps] == pytest.approx([right for *_, right in steps])
    assert of_newcomer == steps[-10:]


# --- errors


@on_ranks(2)
def test_what_cannot_be_scaled_is_refused() -> None:
    optimizer = optimizer_of()
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    scaled = ScaledLR(lr_scheduler.StepLR(optimizer_of(), 1))
    counting = ScaledLR(lr_scheduler.StepLR(optimizer_of(), 1), 8)
    gone = optimizer_of()
    ScaledLR(lr_scheduler.StepLR(gone, 1))
    gc.collect()
    odd, resumed = Delegating(new()), new()
    resumed.load_state_dict(gone.state_dict())
    again = "a ScaledLR scales the rates of this optimizer already"
    for words, call in [
        ("counts evaluations", lambda: ScaledLR(plateau, 8)),
        ("batch_size=0", lambda: ScaledLR(cosine, 0)),
        ("function of the number of ranks", lambda: ScaledLR(cosine, 8, scale=2.0)),
        ("scale(2) is 0.0", lambda: ScaledLR(cosine, 8, scale=lambda size: size - 2)),
        ("ScaledLR scales the rates itself", lambda: ScaledLR(scaled)),
        (again, lambda: ScaledLR(lr_scheduler.StepLR(scaled.optimizer, 1))),
        (again, lambda: ScaledLR(lr_scheduler.StepLR(gone, 1))),
        (again, lambda: ScaledLR(lr_scheduler.StepLR(copy.deepcopy(counting.optimizer), 1))),
        (again, lambda: ScaledLR(lr_scheduler.CosineAnnealingLR(resumed, 9, last_epoch=1))),
        (again, lambda: WarmupLR(gone, 1)),
        ("step(7.9)", lambda: counting.step(7.9)),
        ("whole number", lambda: counting.step(torch.tensor(1.5))),
        ("negative", lambda: counting.step(-1)),
        ("not call Optimizer.__init__()", lambda: ScaledLR(lr_scheduler.StepLR(odd, 1))),
        ("WarmupLR scales the rates itself", lambda: ScaledLR(WarmupLR(optimizer_of(), 1))),
        ("give ScaledLR a batch_size", lambda: scaled.step(8)),
        ("not a state of ScaledLR", lambda: scaled.load_state_dict(cosine.state_dict())),
        ("batch_size=4", lambda: scaled.load_state_dict(scaled.state_dict() | {"batch_size": 4})),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
    with pytest.raises(TypeError, match="wraps a scheduler of torch"):
        ScaledLR(optimizer)
    assert (counting.samples, counting.get_last_lr()) == (0, [0.2])


# --- the warning about a rate of other ranks


class Rateless(torch.optim.Optimizer):
    """Sets its own step, as Adafactor may."""

    def step(self, closure: Any = None) -> None:
        assert closure is None


def resume(path: Path, how: str) -> list[str]:
    """Load an optimizer's state on other ranks, and step; return what was told."""
    optimizer = optimizer_of(0.1 * hvd.size())
    schedulers = []
    if how == "without rates":
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(Rateless([weight], {}), [("weight", weight)])
    if "scaled" in how:
        ScaledLR(lr_scheduler.StepLR(optimizer, 9), 8)  # its hooks stay
    if "warmup" in how:
        schedulers = [WarmupLR(optimizer, 1, scale=2.0 if "own" in how else None)]
    if "gone" in how:
        schedulers.clear()
        gc.collect()
    with logged() as messages:
        state = torch.load(path, weights_only=True)
        group = state["param_groups"][0]
        if how == "without rates":
            group["lr"] = None
        if how == "of a program without torch_ring":
            del state["torch_ring_ranks"]
        optimizer.load_state_dict(state)
        if how == "by hand":
            optimizer.param_groups[0]["lr"] = 0.1 * hvd.size()
        train(optimizer)
        train(optimizer)
    if how == "scaled":
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * hvd.size())
    return messages


def keep(path: Path, how: str) -> None:
    optimizer = optimizer_of(0.1 * (1 if how == "scaled" else hvd.size()))
    scheduler = ScaledLR(lr_scheduler.StepLR(optimizer, 9), 8) if how == "scaled" else None
    train(optimizer)
    if hvd.rank() == 0:
        torch.save(optimizer.state_dict(), path)
    del scheduler


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("", "state is of 2 ranks, and 3 continue with its learning rate 0.2"),
        ("by hand", ""),
        ("warmup", ""),
        ("warmup of its own", "state is of 2 ranks, and 3 continue with its learning rate 0.2"),
        ("warmup gone", "state is of 2 ranks, and 3 continue with its learning rate 0.2"),
        ("scaled", ""),
        ("scaled, of a plain state", "state is of 2 ranks without ScaledLR"),
        ("without rates", ""),
        ("of a program without torch_ring", "has brought the learning rate 0.2 in place of 0.3"),
    ],
)
def test_a_rate_of_other_ranks_is_told(tmp_path, how, told):
    run(keep, 2, args=(tmp_path / "state", how))
    first, *others = run(resume, 2, args=(tmp_path / "state", how))
    assert others == [[]]
    assert [told in line for line in first] == [True] * ("scaled," in how)
    first, *others = run(resume, 3, args=(tmp_path / "state", how))
    assert others == [[], []]
    assert [told in line for line in first] == [True] * bool(told)


# --- the program of the docs


def follow_the_page(path: Path, last: int) -> tuple[int, float]:
    """Run the program of the page up to an epoch; return the samples so far, and the rate."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.1))
    names: dict[str, Any] = {
        **vars(lr_scheduler),
        **{"checkpoint": checkpoint, "hvd": hvd, "math": math, "torch": torch},
        **{"DataLoader": DataLoader, "ScaledLR": ScaledLR, "ShardedSampler": ShardedSampler},
        "dataset": TensorDataset(torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1)),
        **{"epochs": EPOCHS, "last": last, "model": model, "mse_loss": mse_loss},
    }
    page = (ROOT / "docs" / "input-pipeline.md").read_text()
    (program,) = (
        each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "job.pt" in each
    )
    for there, here in {
        "job.pt": str(path),
        "sampler.epoch, epochs": "sampler.epoch, last",
    }.items():
        assert there in program
        program = program.replace(there, here)
    exec(program, names)
    return names["scheduler"].samples, names["optimizer"].param_groups[0]["lr"]


def test_the_program_of_the_docs_goes_on_with_other_ranks(tmp_path):
    args = tmp_path / "job.pt"
    of_one = rates_of_one(KINDS["cosine"])
    assert run(follow_the_page, 2, args=(args, 3)) == [(3 * 512, pytest.approx(2 * of_one[48]))] * 2
    samples = 3 * 512 + 3 * 510  # of an epoch, two samples are left out
    rate = pytest.approx(3 * of_one[samples // BATCH])
    assert run(follow_the_page, 3, args=(args, EPOCHS)) == [(samples, rate)] * 3
