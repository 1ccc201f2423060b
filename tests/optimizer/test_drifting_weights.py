"""Ranks drift apart during training, in weights or hyper-parameters: occasional warnings."""

from __future__ import annotations

import contextlib
import re
from unittest import mock

import pytest
import torch
from logs import logged, told
from pool import run
from torch import nn
from torch.optim import SGD, Adam
from training import assert_same_on_all_ranks, make_model, take_step, weights
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.optimizer import weight_comparison
from torch_ring.optimizer.weight_comparison import is_compared


def test_the_steps_after_which_ranks_compare():
    compared = [step for step in range(4001) if is_compared(step)]
    assert compared == [1, 10, 100, 1000, 2000, 3000, 4000]


def wrapped(model: nn.Module, **arguments: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=1e-4, momentum=0.5), model.named_parameters(), **arguments
    )


def own_loss(model: nn.Module) -> torch.Tensor:
    """Return a loss of this rank's own."""
    return model(torch.full((2, 8), hvd.rank() + 1.0)).sum()


def beginnings(messages: list[str]) -> list[str]:
    return [message.partition(": ")[0] for message in messages]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    take_step(optimizer, own_loss(model))


def drift(op: hvd.ReduceOp) -> None:
    """Rank 1 writes into a weight in step 5, and into another one in step 50."""
    model = make_model()
    optimizer = wrapped(model, op=op)
    for number in range(1, 103):
        if hvd.rank() == 1 and number in (5, 50):
            model[0 if number == 5 else 2].bias.data += 1e-3
        step(model, optimizer)


REMEDY = (
    "after step 1 all had the same. "
    "Gradients are averaged, weights are not, so they stay different: call broadcast_parameters("
    "model.state_dict(), root_rank=0) and look for what one rank alone does: a gradient that it "
    "sets or changes after the average, a learning rate of its own, a write into a weight. "
    "TORCH_RING_CHECK_EVERY=1 makes the first step after which they differ an error"
)


@pytest.mark.parametrize(
    ("op", "size", "transport"), [(hvd.Average, 3, "tcp"), (hvd.Adasum, 2, "shm")]
)
def test_a_write_into_a_weight_is_told(op, size, transport):
    assert told(drift, size, op, transport=transport) == [
        "after step 10 the ranks train different weights: '0.bias' on rank 1 is not that on rank 0 "
        f"(1 of 6 parameters of this optimizer differ); {REMEDY}",
        "after step 100 the ranks train different weights: '0.bias' on rank 1 is not that on rank "
        f"0 (2 of 6 parameters of this optimizer differ); {REMEDY}",
    ]


def drift_late() -> None:
    """The odd rank is the lowest; a difference that disappears and returns is reported again."""
    (weight,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=0.0), [("w", weight)])
    with mock.patch.object(weight_comparison, "_EVERY", 20):
        for number in range(1, 83):
            if hvd.rank() == 0 and number in (15, 75):
                weight.data += 1
            if number == 45:
                hvd.broadcast_parameters([weight], 1)
            take_step(optimizer, weight * 2)


@on_both_transports
def test_again_and_again(transport):
    messages = told(drift_late, 3, transport=transport)
    assert [message.partition("(1 of")[0] for message in messages] == [
        f"after step {number} the ranks train different weights: 'w' on rank 0 is not that on "
        "rank 1 "
        for number in (20, 80)
    ]
    assert [message.partition("; ")[2].partition(".")[0] for message in messages] == [
        f"after step {number} all had the same" for number in (10, 60)
    ]


def learn_at_own_rates(change_at: int) -> None:
    """Rank 1's own loss falls no more, so that its scheduler halves the rate, alone."""
    model = make_model()
    rate = 0.5 if change_at else torch.tensor(0.5)
    optimizer = hvd.DistributedOptimizer(
        Adam(model.parameters(), lr=rate, betas=(0.9, 0.99), foreach=False),
        model.named_parameters(),
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, patience=0)
    scheduler.step(0.0)
    for number in range(13):
        if number == change_at and hvd.rank() == 1:
            scheduler.step(1.0)
        step(model, optimizer)


@on_both_transports
@pytest.mark.parametrize("change_at", [0, 4])
def test_hyper_parameters_are_told_with_both_values(change_at, transport):
    first, *drifted = told(learn_at_own_rates, 2, change_at, transport=transport)
    when = "after step 10 " if change_at else ""
    since = "; after step 1 all had the same" if change_at else ""
    assert re.sub(r"1 of \d+ of", "1 of all of", first) == (
        f"{when}the ranks train with different hyper-parameters: 'lr' of group 0 on rank 1 (0.25) "
        f"is not that on rank 0 (0.5); 1 of all of this optimizer differ{since}. Each rank steps "
        "with its own, so that their weights drift apart: make them from values that all ranks "
        "have, such as a loss that allreduce() has averaged, or call broadcast_optimizer_state("
        "optimizer, root_rank=0)"
    )
    step_of_drift = 10 if change_at else 1
    assert beginnings(drifted) == [f"after step {step_of_drift} the ranks train different weights"]


def replace_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, hvd.rank() + 1.0)


class Private(SGD):
    """Replaces each rank's gradients in step(), as Opacus' DPOptimizer does."""

    def step(self, closure=None):
        replace_gradients(self)
        return super().step(closure)


def train_privately(is_around: bool) -> None:
    model = make_model()
    cls = SGD if is_around else Private
    optimizer = hvd.DistributedOptimizer(cls(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        own_loss(model).backward()
        if is_around:
            replace_gradients(optimizer)
        optimizer.step()


@pytest.mark.parametrize(("transport", "is_around"), [("shm", True), ("shm", False), ("tcp", True)])
def test_gradients_replaced_after_the_average_are_told_at_the_first_step(transport, is_around):
    messages = told(train_privately, 2, is_around, transport=transport)
    assert beginnings(messages) == ["after step 1 the ranks train different weights"]


def sharpness_aware() -> None:
    """SAM with a first step on local gradients: weights differ in the middle of a step."""
    model = make_model()
    optimizer = wrapped(model)
    parameters = list(model.parameters())
    for _ in range(12):
        with optimizer.no_sync():
            own_loss(model).backward()
        ascent = [0.1 * parameter.grad for parameter in parameters]
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(parameters, ascent)
        own_loss(model).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, ascent)
            torch._foreach_mul_(parameters, 0)  # exactly the others' values
        optimizer.step()
        optimizer.zero_grad()


def train_alone_and_average() -> None:
    """Local SGD: nine steps with this rank's gradients, then the weights are averaged."""
    model = make_model()
    optimizer = wrapped(model)
    for number in range(1, 103):
        optimizer.zero_grad()
        with optimizer.no_sync():
            own_loss(model).backward()
        with optimizer.skip_synchronize():
            optimizer.step()
        if number % 10 == 0:
            for parameter in model.parameters():
                hvd.allreduce_(parameter.data)
            hvd.broadcast_optimizer_state(optimizer, 0)
            step(model, optimizer)


@pytest.mark.parametrize("train", [sharpness_aware, train_alone_and_average])
def test_weights_that_may_differ_for_a_while(train):
    assert told(train, 2) == []


def train_in_turns() -> None:
    """Two optimizers that step in turn; a rank leaves out backward now and then."""
    rank = hvd.rank()
    a, b = weights(1, 2)
    first = hvd.DistributedOptimizer(SGD([a], lr=0.1), [("a", a)])
    second = hvd.DistributedOptimizer(SGD([b], lr=0.1), [("b", b)], backward_passes_per_step=2)
    for number in range(130):
        if number == 50 and rank == 1:
            b.data += 1
        first.zero_grad()
        if number % 10 != 2 or rank != 1:
            (a * (rank + 1)).backward()
        first.step()
        if number % 3 == 0:
            second.zero_grad()
            for part in range(2):
                if (number + part) % 5 != rank:
                    (b * (rank + 1)).backward()
            second.step()
    for _ in range(200):
        second.zero_grad()
        (b * 1).backward()
        (b * 1).backward()
        second.step()


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (3, "tcp")])
def test_several_optimizers_count_their_own_steps(size, transport):
    (message,) = told(train_in_turns, size, transport=transport)
    assert "after step 100 " in message
    assert "'b' on" in message


def drift_and_join() -> None:
    """Rank 1 joins before step 10; the others compare without it. Steps count anew after join()."""
    model = make_model()
    optimizer = wrapped(model)
    steps = 5 if hvd.rank() == 1 else 15
    for _ in range(2):
        for number in range(1, steps + 1):
            if hvd.rank() == 2 and number == 7:
                model[0].bias.data += 1
            step(model, optimizer)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), last)
        hvd.broadcast_optimizer_state(optimizer, last)


@on_both_transports
def test_ranks_that_have_joined_take_no_part(transport):
    assert beginnings(told(drift_and_join, 3, transport=transport)) == [
        "after step 10 the ranks train different weights",
        "after step 10 since join() the ranks train different weights",
    ]


def drift_in_a_set() -> None:
    pair = hvd.add_process_set([0, 2])
    model = make_model()
    optimizer = wrapped(model, process_set=pair)
    for number in range(12):
        if number == 4 and hvd.rank() == 2:
            optimizer.param_groups[0]["momentum"] = 0.25
        step(model, optimizer)


def test_a_process_set_compares_for_itself():
    settings, different = told(drift_in_a_set, 3)
    assert "'momentum' of group 0 on rank 2 (0.25) is not that on rank 0 (0.5); 1 of" in settings
    assert settings.endswith("root_rank=0, process_set=...)")
    assert "after step 10 the ranks train different weights" in different


AVERAGED = (
    "That step has averaged gradients which no backward pass had averaged (set by the program, or "
    "computed under no_sync()): if the program clips all gradients before, each rank does so by a "
    "norm of its own. Call optimizer.synchronize() first, then clip, then step()"
)


def set_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> None:
    """Backward averages some gradients, or all; others are left to the step."""
    optimizer.zero_grad()
    if way == "backward":
        own_loss(model).backward()
        return
    hidden = model[:2](torch.full((2, 8), hvd.rank() + 1.0))
    hidden.sum().backward()
    loss, parameters = model[2:](hidden.detach()).sum(), list(model[2:].parameters())
    if way == "no_sync":
        with optimizer.no_sync():
            loss.backward()
        return
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def clip_own_gradients(way: str, clips: str) -> tuple[list[list[str]], list[int]]:
    """Return the warnings of each step, and the steps after which weights were compared."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    comparison = optimizer._reducer.comparison
    taken: list[int] = []
    take = comparison.take
    comparison.take = lambda steps, number: (taken.append(steps), take(steps, number))
    every = []
    for number in range(9):
        with logged() as messages:
            set_gradients(model, optimizer, way if number >= 2 else "backward")
            if clips == "after synchronize":
                optimizer.synchronize()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            skips = clips == "after synchronize" and number % 2 == 0
            with optimizer.skip_synchronize() if skips else contextlib.nullcontext():
                optimizer.step()
        every.append(messages)
    if clips != "before":
        assert_same_on_all_ranks(*model.parameters())
    return every, taken


@pytest.mark.parametrize("way", ["by hand", "no_sync"])
@on_both_transports
def test_gradients_that_each_rank_clips_before_they_are_averaged(transport, way):
    args = (way, "before")
    (messages, _), (others, _) = run(clip_own_gradients, 2, args=args, transport=transport)
    assert not any(others)
    assert [bool(each) for each in messages] == [number == 3 for number in range(9)]
    (text,) = messages[3]
    assert text.startswith("after step 3 the ranks train different weights: '0.weight' on rank 1 ")
    assert text.endswith(AVERAGED)


@pytest.mark.parametrize("clips", ["", "after synchronize"])
@pytest.mark.parametrize("way", ["by hand", "no_sync"])
def test_gradients_set_by_hand_are_compared_once(way, clips):
    for messages, taken in run(clip_own_gradients, 2, args=(way, clips)):
        assert not any(messages)
        assert taken == [0, 1, 3]
