# SPDX-License-Identifier: Apache-2.0
"""Ranks whose weights or hyper-parameters differ, at the start or later: occasional warnings."""

from __future__ import annotations

import contextlib
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

OPS = [hvd.Average, hvd.Adasum]  # Adasum compares in a way of its own


def own_loss(model: nn.Module) -> torch.Tensor:
    """Return a loss of this rank's own."""
    return model(torch.full((2, 8), hvd.rank() + 1.0)).sum()


def wrap(model: nn.Module, rate: float = 1e-4, **options: object) -> torch.optim.Optimizer:
    sgd = SGD(model.parameters(), lr=rate, momentum=0.5)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)


def beginnings(messages: list[str]) -> list[str]:
    """Return the first words: when, and what differs on which ranks."""
    return [message.partition(" (")[0] for message in messages]


# --- at the first gradients, and after join()


def forget_to_broadcast(broadcast: str, op: hvd.ReduceOp) -> None:
    """Train models of different seeds; `broadcast`: "never", or its point in the set-up."""
    model = make_model(seed=hvd.rank())
    if broadcast == "first":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(model, op=op)
    if broadcast == "last":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(3):
        take_step(optimizer, model(torch.ones(2, 8)).sum())


@pytest.mark.parametrize(
    ("transport", "size", "op", "others"),
    [
        ("shm", 3, hvd.Average, "ranks 1, 2"),
        ("tcp", 2, hvd.Average, "rank 1"),
        ("shm", 2, hvd.Adasum, "rank 1"),
    ],
)
def test_a_forgotten_broadcast_is_told(transport, size, op, others):
    (message,) = told(forget_to_broadcast, size, "never", op, transport=transport)
    text = (
        f"the ranks train different weights: '0.weight' on {others} is not that on rank 0 (6 of 6 "
    )
    assert message.startswith(text)
    assert "call broadcast_parameters(model.state_dict(), root_rank=0) before the first" in message


@pytest.mark.parametrize("broadcast", ["first", "last"])
def test_a_broadcast_before_the_first_step_is_enough(broadcast):
    assert told(forget_to_broadcast, 3, broadcast, hvd.Average) == []


def start_late(kind: str, differs: bool) -> None:
    """Not all ranks have a gradient when the optimizer's first ones are reduced."""
    rank = hvd.rank()
    (a,), (b,) = weights(1), weights(3 if differs and rank == 1 else 2)
    passes = 2 if kind == "accumulates" else 1
    first = hvd.DistributedOptimizer(SGD([a], lr=1.0))
    second = hvd.DistributedOptimizer(SGD([b], lr=0.0), backward_passes_per_step=passes)
    if kind == "one optimizer each":
        (2 * a if rank == 0 else 4 * b).backward()
        first.step()
    elif kind == "skips":
        if rank == 0:
            (a + b).backward()
        first.step()
    else:
        b.backward()
        b.backward()
    second.step()
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        for _ in range(passes):
            (a + (rank + 1) * b).backward()
        assert grads([b])[0] == 1.5 * passes
        first.step()
        second.step()


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("kind", ["one optimizer each", "skips", "accumulates"])
def test_optimizers_that_start_late(kind, differs):
    text = "the ranks train different weights: 'allreduce.noname.0.0' on rank 1 is not that on rank"
    assert beginnings(told(start_late, 2, kind, differs)) == [f"{text} 0"] * differs


def join_and_go_on(broadcast: bool, op: hvd.ReduceOp) -> None:
    """Rank 1 has fewer batches, or none: after join() its weights are older than the others'."""
    model = make_model()
    optimizer = wrap(model, op=op)
    for epoch in range(4):
        fewer = 1 if op == hvd.Average else 0  # it compares weights when the others do
        for _ in range(fewer if hvd.rank() == 1 and epoch < 3 else 3):
            take_step(optimizer, model(torch.ones(2, 8)).sum())
        last = hvd.join()
        if broadcast:
            hvd.broadcast_parameters(model.state_dict(), last)
            hvd.broadcast_optimizer_state(optimizer, last)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_a_forgotten_broadcast_after_join(op, broadcast):
    messages = [each for each in told(join_and_go_on, 2, broadcast, op) if "6 of 6" in each]
    assert ["on rank 1 is not that on rank 0" in each for each in messages] == [True] * (
        not broadcast
    )


# --- later


def drift(op: hvd.ReduceOp) -> None:
    """Rank 1 writes into a weight; later it does so again, and into another one, too."""
    model = make_model()
    optimizer = wrap(model, op=op)
    with mock.patch.object(weight_comparison, "_EVERY", 20):
        for number in range(1, 103):
            if hvd.rank() == 1 and number in (5, 65):
                model[0].bias.data += 1e-3
            if hvd.rank() == 1 and number == 85:
                model[2].bias.data += 1e-3
            if number == 45:
                hvd.broadcast_parameters(model.state_dict(), 0)
                hvd.broadcast_optimizer_state(optimizer, 0)
            take_step(optimizer, own_loss(model))


@pytest.mark.parametrize(
    ("op", "size", "transport"), [(hvd.Average, 3, "tcp"), (hvd.Adasum, 2, "shm")]
)
def test_a_write_into_a_weight_is_told(op, size, transport):
    """A difference is told once, and again if it has disappeared or if others have joined it."""
    messages = told(drift, size, op, transport=transport)
    assert [message.partition(". ")[0] for message in messages] == [
        f"after step {step} the ranks train different weights: '0.bias' on rank 1 is not that on "
        f"rank 0 ({count} of 6 parameters of this optimizer differ); after step {equal} all had "
        "the same"
        for step, count, equal in ((10, 1, 1), (80, 1, 60), (100, 2, 60))
    ]


def learn_at_own_rates(change_at: int) -> None:
    """Rank 1's own loss falls no more, so that its scheduler halves the rate, alone."""
    model = make_model()
    rate = 0.5 if change_at else torch.tensor(0.5)
    optimizer = hvd.DistributedOptimizer(Adam(model.parameters(), lr=rate, foreach=False))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, patience=0)
    scheduler.step(0.0)
    for number in range(13):
        if number == change_at and hvd.rank() == 1:
            scheduler.step(1.0)
        take_step(optimizer, own_loss(model))


@pytest.mark.parametrize(("change_at", "transport"), [(0, "shm"), (4, "tcp")])
def test_hyper_parameters_are_told_with_both_values(change_at, transport):
    first, *drifted = told(learn_at_own_rates, 2, change_at, transport=transport)
    when = "after step 10 " if change_at else ""
    since = "; after step 1 all had the same" if change_at else ""
    assert first.startswith(
        f"{when}the ranks train with different hyper-parameters: 'lr' of group 0 on rank 1 (0.25) "
        "is not that on rank 0 (0.5); 1 of "
    )
    assert f" of this optimizer differ{since}. Each rank" in first
    (message,) = drifted
    assert f"after step {10 if change_at else 1} the ranks train different weights" in message


def be_sharpness_aware() -> None:
    """SAM with a first step on local gradients: weights differ in the middle of a step."""
    (weight,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=0.125))
    for _ in range(12):
        with optimizer.no_sync():
            (weight * (1 + hvd.rank())).backward()
        kept = weight.data.clone()
        weight.data += weight.grad
        optimizer.zero_grad()
        (weight * (1 + hvd.rank())).backward()
        weight.data.copy_(kept)
        optimizer.step()
        optimizer.zero_grad()


def test_weights_that_differ_within_a_step_are_no_difference():
    assert told(be_sharpness_aware, 2) == []


def drift_in_a_set() -> None:
    """The lowest rank of the set warns, and is the root to broadcast from."""
    pair = hvd.add_process_set([1, 2])
    model = make_model()
    optimizer = wrap(model, process_set=pair)
    for number in range(12):
        if number == 4 and hvd.rank() == 2:
            optimizer.param_groups[0]["momentum"] = 0.25
        take_step(optimizer, own_loss(model))


def test_a_process_set_compares_for_itself():
    settings, different = told(drift_in_a_set, 3, by=1)
    assert "'momentum' of group 0 on rank 2 (0.25) is not that on rank 1 (0.5); 1 of" in settings
    assert settings.endswith("root_rank=1, process_set=...)")
    assert "after step 10 the ranks train different weights" in different


def set_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> None:
    """Backward averages some gradients; others are left to the step."""
    hidden = model[:2](torch.full((2, 8), hvd.rank() + 1.0))
    hidden.sum().backward()
    loss, parameters = model[2:](hidden.detach()).sum(), list(model[2:].parameters())
    if way == "no_sync":
        with optimizer.no_sync():
            loss.backward()
        return
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def clip_own_gradients(way: str, clips: str) -> list[list[str]]:
    """Return the warnings of each step."""
    model = make_model()
    optimizer = wrap(model, rate=0.1)
    every = []
    for number in range(9):
        optimizer.zero_grad()
        with logged() as messages:
            if number < 2:
                own_loss(model).backward()
            else:
                set_gradients(model, optimizer, way)
            if clips == "after synchronize":
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            skips = clips == "after synchronize" and number % 2 == 0
            with optimizer.skip_synchronize() if skips else contextlib.nullcontext():
                optimizer.step()
        every.append(messages)
    if clips == "after synchronize":
        assert_same_on_all_ranks(*model.parameters())
    return every


@pytest.mark.parametrize("way", ["by hand", "no_sync"])
@on_both_transports
def test_gradients_that_each_rank_clips_before_they_are_averaged(transport, way):
    """The ranks compare weights after the first step that averages gradients itself."""
    args = (way, "before synchronize")
    messages, others = run(clip_own_gradients, 2, args=args, transport=transport)
    assert not any(others)
    assert [bool(each) for each in messages] == [number == 3 for number in range(9)]
    (text,) = messages[3]
    assert text.startswith("after step 3 the ranks train different weights: '0.weight' on rank 1 ")
    assert "That step has averaged gradients which no backward pass had averaged" in text
    for messages in run(clip_own_gradients, 2, args=(way, "after synchronize")):
        assert not any(messages)


# --- the comparison


def test_the_steps_after_which_ranks_compare():
    compared = [step for step in range(4001) if is_compared(step)]
    assert compared == [1, 10, 100, 1000, 2000, 3000, 4000]


def test_many_ranks_are_not_listed():
    ones, twos = [["a", "", 1], ["b", "", 1]], [["a", "", 1], ["b", "", 2]]
    difference = find_difference(
        {**dict.fromkeys([0, 3, 5, 7, 10, 11, 12], ones), **dict.fromkeys([1, 2, 4, 6, 8, 9], twos)}
    )
    assert difference is not None
    assert (difference.names, difference.compared) == (["b"], 2)
    assert difference.others_in_words == "ranks 1, 2, 4, 6 and 2 more"
    assert find_difference({0: ones, 1: ones}) is None


@pytest.mark.parametrize("shape", [(), (7, 3), (2, 1024), (2047,), (8190,), (3, 4097)])
def test_a_digest_sees_every_element(shape):
    for name in ("float32", "float64", "bfloat16", "complex64", "float8_e4m3fn", "int8", "bool"):
        original = torch.zeros(shape, dtype=torch.float32).to(getattr(torch, name))
        for position in {0, original.numel() // 2, original.numel() - 1}:
            changed = original.clone()
            changed.view(-1)[position] = 1
            digests = digests_of([original, original.clone(), changed])
            assert digests[0] == digests[1] != digests[2], (name, position)


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
    constants = [torch.full((64, 64), value) for value in (0.0, -0.0, 1.0, 2.0, torch.nan)]
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
