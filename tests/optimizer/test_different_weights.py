# SPDX-License-Identifier: Apache-2.0
"""Ranks whose weights or hyper-parameters differ, at the start or later: occasional warnings."""

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
from training import assert_same_on_all_ranks, grads, make_model, take_step, weights
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.collectives.compare import digests_of, find_difference
from torch_ring.optimizer import weight_comparison
from torch_ring.optimizer.weight_comparison import is_compared


def forget_to_broadcast(broadcast: str, op: hvd.ReduceOp = hvd.Average) -> None:
    """Train models of different seeds; `broadcast`: "never", or its point in the set-up."""
    model = make_model(seed=hvd.rank())
    if broadcast == "first":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=op
    )
    if broadcast == "last":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(3):
        take_step(optimizer, model(torch.ones(2, 8)).sum())


@pytest.mark.parametrize(
    ("transport", "size", "others"), [("shm", 3, "ranks 1, 2"), ("tcp", 2, "rank 1")]
)
def test_a_forgotten_broadcast_is_told(transport, size, others):
    assert told(forget_to_broadcast, size, "never", transport=transport) == [
        f"the ranks train different weights: '0.weight' on {others} is not that on rank 0 (6 of 6 "
        "parameters of this optimizer differ). Gradients are averaged, weights are not, so they "
        "stay different: call broadcast_parameters(model.state_dict(), root_rank=0) before the "
        "first step, and after join(), from the rank that join() returns"
    ]


def test_adasum_warns_too():
    (message,) = told(forget_to_broadcast, 2, "never", hvd.Adasum)
    assert "'0.weight' on rank 1 is not that on rank 0" in message


@pytest.mark.parametrize("broadcast", ["first", "last"])
def test_a_broadcast_before_the_first_step_is_enough(broadcast):
    assert told(forget_to_broadcast, 3, broadcast) == []


def change_one_of_many(change: int | None) -> None:
    """The value or the sign of one weight of rank 1 differs from the others'."""
    parameters = weights(1.0, float("nan"), 0.0)
    if hvd.rank() == 1 and change is not None:
        parameters[change].data.copy_(torch.tensor(2.0 if change == 0 else -0.0))
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
    for _ in range(2):
        take_step(optimizer, sum(parameters))


@pytest.mark.parametrize("change", [0, 2, None])
def test_bits_decide(change):
    messages = told(change_one_of_many, 3, change)
    assert all("(1 of 3 parameters of this optimizer differ)" in message for message in messages)
    found = [message.partition(" (")[0] for message in messages]
    name = f"'allreduce.noname.0.{change}'"
    text = f"the ranks train different weights: {name} on rank 1 is not that on rank 0"
    assert found == ([] if change is None else [text])


def start_late(kind: str, differs: bool) -> None:
    """Not all ranks have a gradient when the optimizer's first ones are reduced."""
    rank = hvd.rank()
    (a,), (b,) = weights(1), weights(3 if differs and rank == 1 else 2)
    first = hvd.DistributedOptimizer(SGD([a], lr=1.0))
    second = hvd.DistributedOptimizer(
        SGD([b], lr=0.0), backward_passes_per_step=2 if kind == "accumulates" else 1
    )
    if kind == "one optimizer each":
        (2 * a if rank == 0 else 4 * b).backward()
        first.step()
        second.step()
    elif kind == "skips":
        if rank == 0:
            (a + b).backward()
        first.step()
        second.step()
    elif kind == "one after the other":
        take_step(first, a * 2)
        take_step(second, b * 2)
    else:
        b.backward()
        b.backward()
        second.step()
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        (a + (rank + 1) * b).backward()
        if kind == "accumulates":
            (a + (rank + 1) * b).backward()
        assert grads([b])[0] == 1.5 * second.backward_passes_per_step
        first.step()
        second.step()


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize(
    "kind", ["one optimizer each", "skips", "one after the other", "accumulates"]
)
def test_optimizers_that_start_late(kind, differs):
    assert [message.partition(" is not")[0] for message in told(start_late, 2, kind, differs)] == [
        "the ranks train different weights: 'allreduce.noname.0.0' on rank 1"
    ] * differs


def train_in_a_set() -> None:
    """The lowest rank of the set warns, and is the root to broadcast from."""
    pair = hvd.add_process_set([1, 2])
    words = nn.Embedding(4, 2, sparse=True)
    nn.init.constant_(words.weight, hvd.rank())
    optimizer = hvd.DistributedOptimizer(
        SGD(words.parameters(), lr=0.1), words.named_parameters(), process_set=pair
    )
    for _ in range(2):
        take_step(optimizer, words(torch.tensor([1, 3])).sum())


def test_a_process_set_warns_for_itself():
    (message,) = told(train_in_a_set, 3, by=1)
    assert "'weight' on rank 2 is not that on rank 1 (1 of 1" in message
    assert message.endswith("root_rank=1, process_set=...) before the first step")


def join_and_go_on(broadcast: bool, fewer: int = 1, op: hvd.ReduceOp = hvd.Average) -> None:
    """Rank 1 has fewer batches: after join() its weights are older than the others'."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=op)
    for epoch in range(4):
        for _ in range(fewer if hvd.rank() == 1 and epoch < 3 else 3):
            take_step(optimizer, model(torch.ones(2, 8)).sum())
        last = hvd.join()
        if broadcast:
            hvd.broadcast_parameters(model.state_dict(), last)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(
    ("transport", "fewer", "op"),
    [("shm", 1, hvd.Average), ("tcp", 1, hvd.Average), ("shm", 0, hvd.Adasum)],
)
def test_a_forgotten_broadcast_after_join(transport, fewer, op, broadcast):
    """A rank that had joined before its first step compares weights when the others do."""
    messages = told(join_and_go_on, 2, broadcast, fewer, op, transport=transport)
    assert ["on rank 1 is not that on rank 0 (6 of 6" in message for message in messages] == (
        [] if broadcast else [True]
    )


def join_before_the_first_step() -> None:
    """The ranks that have not joined compare theirs."""
    model = make_model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    if hvd.rank() > 0:
        take_step(optimizer, model(torch.ones(2, 8)).sum())
    hvd.join()


def test_joined_ranks_do_not_compare():
    (message,) = told(join_before_the_first_step, 3, by=1)
    assert "on rank 2 is not that on rank 1 (6 of 6" in message


_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.bool,
]


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (2, 1024), (2047,), (8190,), (3, 4097)])
def test_a_digest_sees_every_element(shape):
    for dtype in _DTYPES:
        original = torch.zeros(shape, dtype=torch.float32).to(dtype)
        for position in {0, original.numel() // 2, original.numel() - 1}:
            changed = original.clone()
            changed.view(-1)[position] = 1
            same = original.clone()
            digests = digests_of([original, same, changed])
            assert digests[0] == digests[1] != digests[2], (dtype, position)


def test_a_digest_sees_layout_order_places_and_the_highest_bits():
    ramp = torch.arange(64 * 64 * 9.0)
    columns = ramp.view(64, 64, 3, 3).to(memory_format=torch.channels_last)
    shifted = torch.cat([torch.zeros(1), ramp])[1:]  # begins in the middle of a word
    order = torch.arange(4096)
    swapped = order.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    rows = order.view(-1, 512).flip(0).reshape(-1)
    signs = torch.ones(4096, dtype=torch.float64)
    one, other = signs.clone(), signs.clone()
    one[5], other[6] = -1, -1
    constants = [torch.full((64, 64), value) for value in (0.0, 1.0, 2.0)]
    small = [torch.tensor(value) for value in (5, 256, 1 << 62, -(1 << 62))]
    pairs = [torch.tensor(value) for value in ([1, 2], [2, 1], [3, 0], [0, 3])]
    sparse = [torch.sparse_coo_tensor([[i]], [v], (9,)) for i, v in ((1, 2.0), (2, 1.0), (2, 2.0))]
    different = [ramp, ramp.roll(1024), *constants, order, swapped, rows, signs, one, other]
    different += [*small, *pairs, *sparse]
    assert len(set(digests_of(different).tolist())) == len(different)
    assert len(set(digests_of([ramp, columns, shifted]).tolist())) == 1
    unreadable = [torch.empty(3, device="meta"), torch.eye(3).to_sparse_csr(), torch.empty(0, 3)]
    assert digests_of([*unreadable, torch.ones(3)]).ne(0).tolist() == [False, False, False, True]
    assert digests_of([]).tolist() == []


def test_many_ranks_are_not_listed():
    ones, twos = [["a", "", 1], ["b", "", 1]], [["a", "", 1], ["b", "", 2]]
    difference = find_difference(
        {**dict.fromkeys([0, 3, 5, 7, 10, 11, 12], ones), **dict.fromkeys([1, 2, 4, 6, 8, 9], twos)}
    )
    assert difference is not None
    assert difference.names == ["b"]
    assert difference.compared == 2
    assert difference.others_in_words == "ranks 1, 2, 4, 6 and 2 more"
    assert find_difference({0: ones, 1: ones}) is None


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
