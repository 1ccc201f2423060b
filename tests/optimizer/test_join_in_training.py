# SPDX-License-Identifier: Apache-2.0
"""Ranks that run out of batches: join() in training."""

import gc

import pytest
import torch
from pool import run
from torch import nn
from torch.optim import SGD
from training import assert_same_on_all_ranks, make_model, take_step, weights

import torch_ring as hvd


def join_before_the_step() -> None:
    """A rank that joins between backward and step trains on with the others afterwards."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    (2 * x).backward()
    if hvd.rank() == 1:
        hvd.join()
    else:
        optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            (4 * x).backward()
            assert x.grad.item() == pytest.approx(4 * (hvd.size() - 1) / hvd.size())
            optimizer.step()
        hvd.join()
    x.grad = None  # like model.zero_grad()
    if hvd.rank() == 0:  # only one has a gradient: the others learn of it at the step
        (6 * x).backward()
    optimizer.step()
    assert x.grad.item() == pytest.approx(6 / hvd.size())


def join_with_other_gradients(how: str) -> None:
    """An averaged gradient that the program has changed on a rank stays that rank's own."""
    a, b = weights(1, 2)
    optimizer = hvd.DistributedOptimizer(SGD([a, b], lr=0.0), [("a", a), ("b", b)])
    (a + b).backward()
    if how != "clipped here":
        optimizer.step()
    kept = 1.0
    if hvd.rank() == 0:
        if how == "changed there":
            a.grad.mul_(2)
        elif how == "dropped there":
            a.grad = None
    else:
        if how in ("changed here", "clipped here"):
            a.grad.mul_(0.5)
            kept = 0.5
        elif how == "changed on one":
            kept = float(hvd.rank())
            a.grad.fill_(kept)
        a.backward()
        assert a.grad.item() == pytest.approx(kept + 2 / 3)
        assert b.grad.item() == 1.0
    hvd.join()


def join_while_gradients_accumulate(op: hvd.ReduceOp) -> None:
    """A rank joins; another optimizer's pass tells it, and kept gradients are reduced later.

    `c` is in no pass then, and step() averages it once more.
    """
    a, b, c = weights(1, 2, 3)
    first = hvd.DistributedOptimizer(SGD([a, c], lr=0.0), op=op, backward_passes_per_step=2)
    second = hvd.DistributedOptimizer(SGD([b], lr=0.0), op=op)
    size, count = hvd.size(), 1 if op == hvd.Sum else hvd.size()
    for _ in range(2):
        ((1 + hvd.rank()) * (a + b + c)).backward()
    first.step()
    second.step()
    total = sum(1 + rank for rank in range(size))
    assert (a.grad.item(), b.grad.item()) == pytest.approx((2 * total / count, 2 * total / count))
    if hvd.rank() > 0:
        ((1 + hvd.rank()) * a).backward()  # accumulates
        ((1 + hvd.rank()) * b).backward()
        left = total - 1
        assert b.grad.item() == pytest.approx((2 * total + left) / count)
        first.step()
        assert a.grad.item() == pytest.approx((2 * total + left) / count)
        assert c.grad.item() == pytest.approx(2 * total / count)
    hvd.join()


def keep_large_halves() -> None:
    """Two ranks join at once; the sum of their parts exceeds 16 bits."""
    a = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = hvd.DistributedOptimizer(SGD([a], lr=0.0))
    (a * 40000).sum().backward()
    optimizer.step()
    if hvd.rank() > 1:
        (a * 1600).sum().backward()
        assert a.grad.tolist() == [40000 + 800] * 4
        optimizer.step()
    hvd.join()


def join_beside_a_dropped_optimizer() -> None:
    """One rank has dropped an optimizer with accumulating gradients when another rank joins."""
    a, b = weights(1, 2)
    first = hvd.DistributedOptimizer(SGD([a], lr=0.0), backward_passes_per_step=2)
    second = hvd.DistributedOptimizer(SGD([b], lr=0.0))
    (a + b).backward()
    second.step()
    if hvd.rank() == 1:
        del first
        gc.collect()
    if hvd.rank() > 0:
        (b * hvd.rank()).backward()
        assert b.grad.item() == pytest.approx(1 + sum(range(hvd.size())) / hvd.size())
        second.step()
    hvd.join()


def compress() -> None:
    """A stateful compressor needs every rank: ranks that go on get an error, and do not hang."""
    model = make_model()
    compression = hvd.Compression.int8()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), compression=compression)
    if hvd.rank() > 0:
        with pytest.raises(hvd.MismatchError, match="join"):
            model(torch.ones(4, 8)).sum().backward()
    hvd.join()
    optimizer.zero_grad()


def train_on_an_equal_set() -> None:
    """A set that consists of all ranks is the global one: join() brings it in step again, too."""
    everyone = hvd.ProcessSet(range(hvd.size()))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), process_set=everyone)
    for epoch in range(2):
        for step in range(1 + 2 * hvd.rank() + epoch):
            take_step(optimizer, (model(torch.ones(4, 8)) * (step + hvd.rank())).square().mean())
        hvd.broadcast_parameters(model.state_dict(), hvd.join())
    assert_same_on_all_ranks(*model.parameters())


OTHERS = ["changed there", "dropped there", "changed here", "clipped here", "changed on one"]


@pytest.mark.parametrize(
    ("transport", "check", "args", "size"),
    [
        ("shm", join_before_the_step, (), 2),
        ("tcp", join_before_the_step, (), 3),
        ("tcp", compress, (), 3),
        ("shm", train_on_an_equal_set, (), 2),
        *(("shm", join_with_other_gradients, (how,), 3) for how in OTHERS),
        *(("tcp", join_with_other_gradients, (how,), 3) for how in OTHERS[3:]),
        ("shm", join_while_gradients_accumulate, (hvd.Average,), 3),
        ("tcp", join_while_gradients_accumulate, (hvd.Sum,), 3),
        ("shm", keep_large_halves, (), 4),
        ("tcp", join_beside_a_dropped_optimizer, (), 3),
    ],
)
def test_join(transport, check, args, size):
    run(check, size, args=args, transport=transport)
