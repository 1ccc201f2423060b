"""Optimizers of process sets."""

import pytest
import torch
from pool import run
from torch import nn
from torch.optim import SGD
from training import grads, weights
from worlds import on_both_transports

import torch_ring as hvd


def added_sets(*members: list[int]) -> list[hvd.ProcessSet]:
    return [hvd.add_process_set(ranks) for ranks in members]


def train_on_a_set() -> None:
    """Members average over the set; the others step by themselves."""
    (pair,) = added_sets([0, hvd.size() - 1])
    (x,) = weights(1)
    # Horovod's positions, all of them.
    optimizer = hvd.DistributedOptimizer(
        SGD([x], lr=1.0), [("x", x)], hvd.Compression.none, 1, hvd.Average, 2.0, 0, 1, False, pair
    )
    for _ in range(3):
        optimizer.zero_grad()
        ((hvd.rank() + 1) * x).backward()
        expected = (1 + hvd.size()) / 2 if pair.included() else hvd.rank() + 1
        assert x.grad.item() == expected
        optimizer.step()
    assert x.item() == 1 - 3 * expected
    if not pair.included():
        with optimizer.no_sync():
            optimizer.synchronize()
            optimizer.step(lambda: torch.ones(()))


def touch_all_sets() -> None:
    """One backward pass serves several sets; gradients arrive in another order on each rank."""
    sets = [hvd.global_process_set, *added_sets([0, 1], [1, 2], [0, 2])]
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


def use_sets_wrongly() -> None:
    (x,) = weights(1)
    with pytest.raises(ValueError, match="has not been added"):
        hvd.DistributedOptimizer(SGD([x], lr=1.0), process_set=hvd.ProcessSet([0, 1]))
    (pair,) = added_sets([1, 2])
    model = nn.Linear(2, 2 + (hvd.rank() == 2))
    if pair.included():
        with pytest.raises(hvd.MismatchError) as error:
            hvd.DistributedOptimizer(SGD(model.parameters(), lr=1.0), process_set=pair)
        assert "rank 1: allreduce.noname" in str(error.value).replace("'", "")


@pytest.mark.parametrize("program", [train_on_a_set, touch_all_sets, use_sets_wrongly])
@on_both_transports
def test_process_sets_of_optimizers(transport, program):
    run(program, 3, transport=transport)
