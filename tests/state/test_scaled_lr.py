# SPDX-License-Identifier: Apache-2.0
"""ScaledLR: one process's schedule on any number of ranks, and on others after a resume."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arrivals import run_with_arrivals
from logs import logged
from pool import run
from scripts import ROOT
from torch.nn.functional import mse_loss
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    "milestones": lambda o, n: lr_scheduler.MultiStepLR(o, [n // 3, n // 2], 0.5),
    "exponential": lambda o, n: lr_scheduler.ExponentialLR(o, 0.5 ** (1 / n)),
    "linear": lambda o, n: lr_scheduler.LinearLR(o, 0.1, 1.0, n // 2),
    "polynomial": lambda o, n: lr_scheduler.PolynomialLR(o, n, 2.0),
    "lambda": lambda o, n: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step / n)),
    "multiplicative": lambda o, n: lr_scheduler.MultiplicativeLR(o, lambda _: 0.5 ** (1 / n)),
    "in turn": lambda o, n: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 8), lr_scheduler.CosineAnnealingLR(o, n - 8)], [8]
    ),
    "together": lambda o, _: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 8), lr_scheduler.ExponentialLR(o, 0.9)], o
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


Trace = dict[int, float]
"""By the samples that all ranks have seen: the rate of the next step."""


def recipe(path: Path, last: int, kind: str, scaled: bool, scheduler_first: bool) -> Trace:
    """README's program with a schedule, from its checkpoint up to an epoch."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    model = torch.nn.Linear(4, 1)
    rate = 0.1 if scaled else 0.1 * hvd.size()
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if scaled:
        scheduler: Any = ScaledLR(KINDS[kind](optimizer, STEPS), BATCH)
    else:
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.3 * hvd.size(), EPOCHS * len(loader))
    state = checkpoint.load(path, default={"epoch": 0})
    if state["epoch"]:
        model.load_state_dict(state["model"])
        things = [(optimizer, state["optimizer"]), (scheduler, state["scheduler"])]
        for thing, saved in reversed(things) if scheduler_first else things:
            thing.load_state_dict(saved)
    trace = {}
    for epoch in range(state["epoch"], last):
        sampler.set_epoch(epoch)
        for batch, (x, y) in enumerate(loader):
            trace[epoch * SAMPLES + batch * BATCH * hvd.size()] = optimizer.param_groups[0]["lr"]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step(*([len(x)] if scaled else []))
    trace[last * SAMPLES] = optimizer.param_groups[0]["lr"]
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    states = {name: part.state_dict() for name, part in parts.items()}
    checkpoint.save(path, {"epoch": last, **states})
    return trace


def job(
    size: int, path: Path, last: int, kind: str, *, scaled: bool = True, first: bool = False
) -> Trace:
    traces = run(recipe, size, args=(path, last, kind, scaled, first))
    assert traces.count(traces[0]) == size
    return traces[0]


def test_a_schedule_in_steps_is_wrong_on_other_ranks(tmp_path):
    """The fault that ScaledLR is against, as a user falls into it."""
    end = job(2, tmp_path / "two", EPOCHS, "one cycle", scaled=False)[EPOCHS * SAMPLES]
    assert end < 0.01
    job(2, tmp_path / "2 to 4", 2, "one cycle", scaled=False)
    assert job(4, tmp_path / "2 to 4", EPOCHS, "one cycle", scaled=False)[EPOCHS * SAMPLES] > 0.2
    job(4, tmp_path / "4 to 2", 2, "one cycle", scaled=False)
    with pytest.raises(AssertionError, match="Tried to step 25 times"):
        job(2, tmp_path / "4 to 2", EPOCHS, "one cycle", scaled=False)


@pytest.mark.parametrize(
    ("old", "new", "kind", "first"),
    [
        (2, 4, "one cycle", False),
        (4, 2, "one cycle", True),
        pytest.param(4, 1, "cosine", False, marks=pytest.mark.slow),
        pytest.param(1, 4, "in turn", True, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_job_has_the_rates_of_one_that_never_changed(tmp_path, old, new, kind, first):
    before = job(old, tmp_path / "changes", 2, kind)
    after = job(new, tmp_path / "changes", EPOCHS, kind, first=first)
    for size, part in ((old, before), (new, after)):
        never = job(size, tmp_path / f"never {size}", EPOCHS, kind)
        assert part == {samples: never[samples] for samples in part}
        of_one = rates_of_one(KINDS[kind])
        assert never == {s: pytest.approx(size * of_one[s // BATCH]) for s in never}
    assert after[EPOCHS * SAMPLES] < 0.01 * max(after.values())


def everything(path: Path, begin: int, end: int) -> None:
    """Step all kinds of schedulers, from a checkpoint or from the beginning."""
    size = hvd.size()
    states = checkpoint.load(path, default={})
    for kind, make in KINDS.items():
        optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        scheduler = ScaledLR(make(optimizer, STEPS), BATCH)
        of_one = rates_of_one(make)
        if begin:
            optimizer.load_state_dict(states[kind]["optimizer"])
            scheduler.load_state_dict(states[kind]["scheduler"])
        for step in range(begin, end, size):
            rate = optimizer.param_groups[0]["lr"]
            assert rate == pytest.approx(size * of_one[step]), (kind, step)
            assert scheduler.get_last_lr() == [rate]
            optimizer.step()
            scheduler.step(BATCH)
        assert scheduler.samples == end * BATCH
        parts = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        states[kind] = parts
    checkpoint.save(path, states)


def test_every_kind_of_schedule(tmp_path):
    run(everything, 2, args=(tmp_path / "states", 0, 48))
    run(everything, 3, args=(tmp_path / "states", 48, STEPS))


# --- counting


def optimizer_of(rate: float = 0.1, **options: Any) -> Any:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=rate)
    return hvd.DistributedOptimizer(optimizer, [("weight", weight)], **options)


def train(optimizer: Any, passes: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(passes):
        optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()


def count() -> None:
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


def test_samples_of_all_ranks_are_counted():
    run(count, 2)


def watch() -> None:
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


def test_plateaus_and_changes_by_hand():
    run(watch, 2)


# --- another number of ranks within a job


Steps = list[tuple[int, float, float]]
"""Of each step: the number of ranks, its rate, and the rate that is right for them."""


def change(end: int, victim: int) -> tuple[int, Steps]:
    """Train until so many steps after a change of the ranks; return samples and steps."""
    optimizer = optimizer_of()
    scheduler = ScaledLR(lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (10 + step)), BATCH)
    steps: Steps = []
    rank, first = hvd.rank(), hvd.size()

    def note(stepping: Any, *_: Any) -> None:
        right = hvd.size() * 0.1 / (10 + scheduler.samples // BATCH)
        steps.append((hvd.size(), stepping.param_groups[0]["lr"], right))

    optimizer.register_step_post_hook(note)

    @hvd.elastic.run
    def training(state: Any) -> None:
        while state.left > 0:
            optimizer.zero_grad()
            if state.batch == 10 and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.param_groups[0]["params"][0].sum().backward()
            optimizer.step()
            scheduler.step(BATCH)
            state.batch += 1
            state.left -= hvd.size() != state.size
            state.check_host_updates()

    state = hvd.elastic.TorchState(
        optimizer=optimizer, scheduler=scheduler, batch=0, left=end, size=first
    )
    training(state)
    return scheduler.samples, steps


def test_rates_follow_the_ranks_when_one_dies():
    ended = run(change, 3, args=(10, 2), may_die={2})
    for samples, steps in ended[:2]:
        assert samples == (10 * 3 + 10 * 2) * BATCH
        assert [size for size, _, _ in steps] == [3] * 10 + [2] * 10
        assert [rate for _, rate, _ in steps] == pytest.approx([right for *_, right in steps])


def test_rates_follow_the_ranks_when_one_comes():
    *ended, (samples, of_newcomer) = run_with_arrivals(change, 2, 1, args=(10, -1))
    steps = ended[0][1]
    assert ended == [(samples, steps)] * 2
    assert [size for size, _, _ in steps[-10:]] == [3] * 10
    assert {size for size, _, _ in steps[:-10]} == {2}
    assert [rate for _, rate, _ in steps] == pytest.approx([right for *_, right in steps])
    assert of_newcomer == steps[-10:]


# --- errors


def refused() -> list[str]:
    errors = []
    optimizer = optimizer_of()
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    scaled = ScaledLR(lr_scheduler.StepLR(optimizer_of(), 1))
    for call in (
        lambda: ScaledLR(plateau, 8),
        lambda: ScaledLR(cosine, 0),
        lambda: ScaledLR(cosine, 1.5),
        lambda: ScaledLR(cosine, 8, scale=2.0),
        lambda: ScaledLR(cosine, 8, scale=lambda size: size - 2),
        lambda: ScaledLR(scaled),
        lambda: ScaledLR(lr_scheduler.StepLR(scaled.optimizer, 1)),
        lambda: ScaledLR(WarmupLR(optimizer_of(), 1)),
        lambda: scaled.step(8),
        lambda: scaled.load_state_dict(cosine.state_dict()),
        lambda: scaled.load_state_dict({**scaled.state_dict(), "batch_size": 4}),
    ):
        with pytest.raises(ValueError, match=" ") as error:
            call()
        errors.append(str(error.value))
    with pytest.raises(TypeError, match="wraps a scheduler of torch"):
        ScaledLR(optimizer)
    counting = ScaledLR(cosine, 8)
    with pytest.raises(ValueError, match="negative"):
        counting.step(-1)
    assert counting.samples == 0
    assert counting.get_last_lr() == [0.2]
    return errors


def test_what_cannot_be_scaled_is_refused():
    for words, error in zip(
        [
            "counts evaluations",
            "batch_size=0",
            "batch_size=1.5",
            "function of the number of ranks",
            r"scale(2) is 0.0",
            "ScaledLR scales the rates itself",
            "a ScaledLR scales the rates of this optimizer already",
            "WarmupLR scales the rates itself",
            "give ScaledLR a batch_size",
            "not a state of ScaledLR",
            "batch_size=4",
        ],
        run(refused, 2)[0],
        strict=True,
    ):
        assert words in error


# --- the warning about a rate of other ranks


class Rateless(torch.optim.Optimizer):
    """Sets its own step, as Adafactor may."""

    def step(self, closure: Any = None) -> None:
        assert closure is None


def resume(path: Path, how: str) -> list[str]:
    """Load an optimizer's state on other ranks, and step; return what was told."""
    optimizer = optimizer_of(0.1 * hvd.size())
    scheduler = None
    if how == "without rates":
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(Rateless([weight], {}), [("weight", weight)])
    if how == "scaled":
        scheduler = ScaledLR(lr_scheduler.StepLR(optimizer, 9), 8, scale=lambda _: 1)
    with logged() as messages:
        state = torch.load(path, weights_only=True)
        if how == "without rates":
            state["param_groups"][0]["lr"] = None
        optimizer.load_state_dict(state)
        if how == "by hand":
            optimizer.param_groups[0]["lr"] = 0.1 * hvd.size()
        train(optimizer)
        train(optimizer)
    del scheduler
    return messages


def keep(path: Path) -> None:
    optimizer = optimizer_of(0.1 * hvd.size())
    train(optimizer)
    if hvd.rank() == 0:
        torch.save(optimizer.state_dict(), path)


@pytest.mark.parametrize("how", ["", "by hand", "scaled", "without rates"])
def test_a_rate_of_other_ranks_is_told(tmp_path, how):
    run(keep, 2, args=(tmp_path / "state",))
    assert run(resume, 2, args=(tmp_path / "state", how)) == [[], []]
    first, *others = run(resume, 3, args=(tmp_path / "state", how))
    assert others == [[], []]
    if how:
        assert first == []
    else:
        (line,) = first
        assert "state is of 2 ranks, and 3 continue with its learning rate 0.2" in line


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
