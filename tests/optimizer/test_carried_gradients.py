# SPDX-License-Identifier: Apache-2.0
"""Gradients that are added to averaged ones: the averaged part is carried, and not sent again."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from carried_programs import DIRECT, add_exactly, train_at_random
from namespaces import NETWORK
from on_ranks import on_ranks
from pool import error_of, run
from slow import slow
from torch import nn
from torch.optim import SGD
from training import assert_same_on_all_ranks, take_step

import torch_ring as hvd


@pytest.mark.parametrize(
    ("transport", "op", "how"),
    [
        ("shm", hvd.Average, ""),
        ("shm", hvd.Sum, "in the program's memory"),
        ("tcp", hvd.Sum, ""),
        ("tcp", hvd.Average, "complex"),
    ],
)
def test_the_sum_of_passes_is_the_sum_of_their_averages(transport, op, how):
    run(add_exactly, 3, args=(op, "cpu", how), transport=transport, env=DIRECT)


def train_programs(seeds: range, op: hvd.ReduceOp, may_fail: bool) -> None:
    for seed in seeds:
        train_at_random(seed, op, "cpu", may_fail=may_fail)


@pytest.mark.parametrize(
    ("transport", "size", "op"),
    [
        ("shm", 2, hvd.Average),
        ("tcp", 3, hvd.Sum),
        slow("shm", 3, hvd.Sum),
        slow("tcp", 3, hvd.Average),
    ],
)
def test_random_programs(transport, op, size, full):
    seeds = range(1000 if full else 8)
    deadline_s = 3600.0 if full else 120.0
    args = (seeds, op, transport == "shm")  # with TCP, gradients are sent before a pass fails
    run(train_programs, size, args=args, transport=transport, env=DIRECT, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("transport", "keeping", "gradient"),
    [
        ("shm", [0, 1, 2], 1 + 4 / 3),
        ("shm", [0, 2], 2 / 3 + 4 / 3),
        ("shm", [0, 1], 2 / 3 + 4 / 3),
        ("shm", [1], 4 / 3),
        ("tcp", [1], 4 / 3),
    ],
)
@on_ranks(3)
def test_a_rank_that_adds_nothing(transport, keeping: list[int], gradient: float) -> None:
    """A rank that adds nothing has an averaged gradient, or has dropped it."""
    a, b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([a, b], lr=0.0))
    (a + b).backward()
    if hvd.rank() not in keeping:
        a.grad = None
    (b if hvd.rank() == 1 else a * 2 + b).backward()
    optimizer.step()
    assert a.grad.item() == pytest.approx(gradient)


def change_both_parts(op: hvd.ReduceOp, how: str) -> None:
    """The program changes a gradient with an averaged part, 1, and one that is not, 2.

    All of it counts as this rank's; a sum cannot tell the parts, and is refused.
    """
    a = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(SGD([a], lr=1.0), [("a", a)], op=op)
    (a.sum() / (hvd.size() if op == hvd.Sum else 1)).backward()
    with optimizer.no_sync():
        (a.sum() * 2).backward()
    assert a.grad.tolist() == [3.0] * 2
    if how == "zeroed":
        a.grad.zero_()
    elif how == "replaced":
        a.grad = torch.zeros(2)
    else:
        a.grad.mul_(0.5)
    text = error_of(lambda: a.sum().backward())[1]
    if how == "halved" and op == hvd.Sum:
        assert "has changed the gradient of 'a', which has a part that is averaged" in text
        assert "optimizer.synchronize() before such a change" in text
    else:
        assert not text
        assert a.grad.tolist()[0] == (1.5 + 1 if how == "halved" else hvd.size())


def replace_in_a_hook(replacement: torch.Tensor) -> None:
    """A hook replaces a gradient, to which this pass has added, by one of its own."""
    a, b = parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
    reached: list[nn.Parameter] = []

    def hook(parameter: nn.Parameter) -> None:
        reached.append(parameter)
        if len(reached) == 4:
            reached[2].grad = replacement

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    (a * 5 + b * 5).sum().backward()
    with optimizer.no_sync():
        (a * 3 + b * 3).sum().backward()
    assert reached[2].grad.tolist() == [1.0] * 2
    assert reached[3].grad.tolist() == [8.0] * 2


def add_after_join(op: hvd.ReduceOp) -> None:
    """After join() ranks have other averages: a rank that had joined lacks the last pass."""
    a, large = parameters = [nn.Parameter(torch.zeros(n)) for n in (1, 100_000)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=op)
    for number in range(3 - hvd.rank()):
        sum(p.sum() * (1.0 + number) for p in parameters).backward()
        optimizer.step()
    hvd.join()
    found = a.grad.item()
    sum(p.sum() * 4 for p in parameters).backward()
    optimizer.step()
    assert large.grad[-1].item() == a.grad.item()
    before = hvd.allgather_object(found)
    assert before[0] != before[1]
    new = 8.0 if op == hvd.Sum else 4.0
    assert a.grad.item() == pytest.approx(sum(before) / 2 + new)


def step_after_a_failed_pass(how: str) -> None:
    """A pass fails on all ranks, and the program steps with what it has."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    passes = 2 if how == "one more" else 1
    if how == "two optimizers":  # the later one has the slots
        earlier = hvd.DistributedOptimizer(SGD(parameters, lr=1.0))
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0), backward_passes_per_step=passes)

    def backward() -> None:
        sum(p * (1.0 + hvd.rank()) for p in parameters).backward()

    for _ in range(passes):
        backward()
    reached: list[int] = []

    def fail(_: torch.Tensor) -> None:
        reached.append(1)
        if len(reached) == 2:
            raise ArithmeticError

    if how == "a graph":
        with pytest.raises(RuntimeError, match="create_graph"):
            sum(p * p * (1.0 + hvd.rank()) for p in parameters).backward(create_graph=True)
    else:
        for parameter in parameters if passes == 1 else ():
            parameter.register_post_accumulate_grad_hook(fail)
        with pytest.raises((ArithmeticError, AssertionError)):
            backward()
    earlier.step() if how == "two optimizers" else optimizer.step()
    assert_same_on_all_ranks(*parameters)  # else they have stepped with gradients of their own


def carry_in_plain_passes() -> None:
    """A gradient of no_sync(), added to a sum, is due in a pass that has none of it."""
    a, b = parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=hvd.Sum)
    for _ in range(5):
        take_step(optimizer, a + b)
    with optimizer.no_sync():
        (a + b * 2).backward()
    (a * 3).backward()
    assert (a.grad.item(), b.grad.item()) == (5 * hvd.size(), 3 * hvd.size())


def doubt_in_plain_passes() -> None:
    """The first pass after join() has one gradient, the next ones have all."""
    a, b = parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
    for number in range(6 - hvd.rank()):
        (a + b * number).backward()
        optimizer.step()
    hvd.join()
    for _ in range(4):
        a.backward()
    (a + b).backward()
    assert_same_on_all_ranks(b.grad)


def add_dense_to_sparse() -> None:
    """Autograd makes another tensor of a sparse average and a dense gradient."""
    weight = nn.Parameter(torch.zeros(4, 2))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=0.0))
    nn.functional.embedding(torch.tensor([hvd.rank()]), weight, sparse=True).sum().backward()
    assert weight.grad.is_sparse
    weight.sum().backward()
    assert weight.grad.to_dense()[:, 0].tolist() == [1.5, 1.5, 1.0, 1.0]
    optimizer.step()


def keep_a_nan() -> None:
    """A pass adds finite gradients to an average that a NaN of rank 1 has spoilt."""
    a = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(SGD([a], lr=1.0), [("a", a)], nan_check=True)
    (a.sum() * (float("nan") if hvd.rank() == 1 else 1.0)).backward()
    a.sum().backward()
    text = error_of(optimizer.step)[1]
    assert "rank 1: the gradient of 'a' has a NaN" in text, text


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (change_both_parts, (hvd.Average, "halved")),
        *((change_both_parts, (hvd.Sum, how)) for how in ("zeroed", "replaced", "halved")),
        (replace_in_a_hook, (torch.ones(2),)),
        (replace_in_a_hook, (torch.ones(1).expand(2),)),
        (add_after_join, (hvd.Average,)),
        (add_after_join, (hvd.Sum,)),
        *(
            (step_after_a_failed_pass, (how,))
            for how in ("error", "one more", "a graph", "two optimizers")
        ),
        (carry_in_plain_passes, ()),
        (doubt_in_plain_passes, ()),
        (add_dense_to_sparse, ()),
        (keep_a_nan, ()),
    ],
)
def test_carried_gradients(check, args):
    run(check, 2, args=args)


def train_on_hosts() -> None:
    hvd.init()
    train_programs(range(6), hvd.Average, may_fail=False)
    hvd.shutdown()


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)")
def test_random_programs_on_two_hosts(hosts):
    run(
        train_on_hosts,
        3,
        initialized=False,
        transport="",
        env=DIRECT | {"MASTER_ADDR": f"{NETWORK}.1"},
        namespaces=[hosts[0], hosts[0], hosts[1]],
    )
