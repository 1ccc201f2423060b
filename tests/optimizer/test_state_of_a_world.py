# SPDX-License-Identifier: Apache-2.0
"""Optimizers of process sets, and state that ends with a process set, a world, a fork."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from on_ranks import on_ranks
from pool import FORKS, run
from torch import nn
from torch.optim import SGD
from training import grads, take_step, weights
from worlds import on_both_transports

import torch_ring as hvd


def train_in_a_world() -> None:
    """Train with optimizers of all kinds, and join."""
    pair = hvd.add_process_set([0, 1])
    optimizers = [
        hvd.DistributedOptimizer(SGD([parameter, other], lr=0.0), **options)
        for options in (
            {},
            {"process_set": pair},
            {"compression": hvd.Compression.int8()},
            {"op": hvd.Adasum},
            {"groups": 2},
            {"shard_state": True},
        )
        for parameter, other in [weights(2, 3)]
    ]
    for _ in range(3):
        for optimizer in optimizers:
            take_step(optimizer, sum(p**2 for p in optimizer.param_groups[0]["params"]))
    hvd.join()


@on_ranks(4)
def test_a_world_goes_without_garbage_collection() -> None:
    """The memory of a world is freed with it, even without garbage collection."""
    hvd.shutdown()
    gc.collect()
    gc.disable()
    held = []
    for _ in range(5):
        hvd.init()
        train_in_a_world()
        hvd.shutdown()
        with open("/proc/self/maps") as maps:
            shared = sum(line.split()[1][3] == "s" for line in maps)
        held.append((len(os.listdir("/proc/self/fd")), shared))
    gc.enable()
    hvd.init()
    # The first one may have made permanent things, such as connections to the store.
    assert held[2:] == [held[1]] * 3


@on_ranks(3)
def test_synchronisation_ends_with_its_process_set() -> None:
    """A set with the ranks and the id of a removed one gets a synchronisation of its own."""
    pair = hvd.add_process_set([0, 1])
    old_id = pair.process_set_id
    (x,), (beside,) = weights(1), weights(4)
    old = hvd.DistributedOptimizer(SGD([x], lr=0.0), process_set=pair)
    others = hvd.DistributedOptimizer(SGD([beside], lr=0.0))
    (x * 2).backward()
    hvd.remove_process_set(pair)
    for call in ((x * 2).backward, old.step) if hvd.rank() < 2 else ():  # it is never averaged
        with pytest.raises(hvd.RingError, match="shut down"):
            call()
    take_step(others, beside * (hvd.rank() + 1))  # the job goes on
    assert grads([beside]) == [2.0]
    pair = hvd.add_process_set([0, 1])
    assert pair.process_set_id == old_id
    if not pair.included():
        return
    with pytest.raises(hvd.RingError, match="shut down"):  # the new set has no optimizer yet
        (x * 2).backward()
    new = hvd.DistributedOptimizer(SGD([x], lr=0.0), process_set=pair)
    new.zero_grad()
    (x * hvd.rank()).backward()  # beside the old optimizer, which takes no part
    assert grads([x]) == [0.5]
    new.step()


@pytest.mark.parametrize("shut_down", [False, True])
@on_ranks(2, kind=FORKS)
def test_a_forked_child_leaves_the_buckets_alone(shut_down: bool) -> None:
    """A forked child's backward pass does not write into the buckets of its parent."""
    parameters = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=hvd.Sum)
    (parameters[0] * 2).backward()
    total = 2 * hvd.size()
    assert grads(parameters) == [total]
    if shut_down:
        hvd.shutdown()
    child = os.fork()
    if child == 0:
        parameters[0].grad = None
        (parameters[0] * 7).backward()
        os._exit(0 if grads(parameters) == [7] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert grads(parameters) == [total]
    del optimizer


@on_ranks(2)
def test_a_refused_optimizer_leaves_no_hooks() -> None:
    """A refused optimizer leaves its parameters unchanged, even while the error exists."""
    compressor = hvd.Compression.int8()
    p, q = weights(1, 1)
    first = hvd.DistributedOptimizer(
        SGD([p], lr=0.0), named_parameters=[("w", p)], compression=compressor
    )
    with pytest.raises(ValueError, match="already serves") as error:
        hvd.DistributedOptimizer(
            SGD([q], lr=0.0), named_parameters=[("w", q)], compression=compressor
        )
    (q * (2 + hvd.rank())).backward()
    assert q.grad.item() == 2 + hvd.rank()  # not averaged
    (p * hvd.rank()).backward()
    first.step()
    assert p.grad.item() == pytest.approx(0.5, abs=0.01)
    assert "already serves" in str(error.value)


def train_on_a_set() -> None:
    """Members average over the set; the others step by themselves."""
    pair = hvd.add_process_set([0, hvd.size() - 1])
    (x,) = weights(1)
    # Horovod's positions, all of them.
    optimizer = hvd.DistributedOptimizer(
        SGD([x], lr=1.0), [("x", x)], hvd.Compression.none, 1, hvd.Average, 2.0, 0, 1, False, pair
    )
    for _ in range(3):
        take_step(optimizer, (hvd.rank() + 1) * x)
    assert x.item() == 1 - 3 * (2.0 if pair.included() else hvd.rank() + 1)
    with optimizer.no_sync():
        optimizer.synchronize()
    optimizer.step(lambda: torch.ones(()))


def touch_all_sets() -> None:
    """One backward pass serves several sets; gradients arrive in another order on each rank."""
    sets = [hvd.global_process_set, *map(hvd.add_process_set, ([0, 1], [1, 2], [0, 2]))]
    parameters = weights(*[1] * len(sets))
    optimizers = [
        hvd.DistributedOptimizer(SGD([p], lr=0.0), [("weight", p)], process_set=s)
        for p, s in zip(parameters, sets, strict=True)  # all have the same name
    ]
    numbers = range(len(sets))
    for step in range(4):
        order = sorted(numbers, key=lambda i: (i * (hvd.rank() + 2) + step) % len(sets))
        total = torch.zeros(())
        for i in order:
            total = total * 1 + parameters[i] * (hvd.rank() + 1)
        total.sum().backward()
        ranks = [s.ranks if s.included() else [hvd.rank()] for s in sets]
        assert grads(parameters) == [sum(r + 1 for r in rs) / len(rs) for rs in ranks]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if hvd.rank() != 0:  # join() of the global set does not touch the counters of the others
        (parameters[0] * 3).backward()
        assert parameters[0].grad.item() == 2
        optimizers[0].step()
        optimizers[0].zero_grad()
    hvd.join()
    sum(parameters).backward()
    assert grads(parameters) == [1] * len(sets)


def wrap_different_models() -> None:
    pair = hvd.add_process_set([1, 2])
    model = nn.Linear(2, 2 + (hvd.rank() == 2))
    if pair.included():
        with pytest.raises(hvd.MismatchError, match="rank 1: 'allreduce"):
            hvd.DistributedOptimizer(SGD(model.parameters(), lr=1.0), process_set=pair)


@pytest.mark.parametrize("program", [train_on_a_set, touch_all_sets, wrap_different_models])
@on_both_transports
def test_process_sets_of_optimizers(transport, program):
    run(program, 3, transport=transport)
