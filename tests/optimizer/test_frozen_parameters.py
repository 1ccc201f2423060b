"""Frozen parameters whose dtype has no gradients: quantised weights."""

import pytest
import torch
from pool import run
from torch.optim import SGD
from training import joined_batches, train
from zoo import FEATURES, Quantised

import torch_ring as hvd


def broadcast_state() -> None:
    model = Quantised()
    model.quantised.data += hvd.rank()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters({"q": model.quantised, "n": model.counts}, root_rank=0)
    assert torch.equal(model.quantised, Quantised().quantised)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, [joined_batches(1)[0].double()])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # now with a state


def test_their_state_is_broadcast():
    run(broadcast_state, 2)


def wrap_for_adasum() -> None:
    model = Quantised()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.01), op=hvd.Adasum)
    model(torch.ones(1, FEATURES, dtype=torch.float64)).sum().backward()
    optimizer.step()


def test_adasum():
    run(wrap_for_adasum, 2)


def unfreeze() -> None:
    model = Quantised()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.01))
    optimizer.step()
    model.low.requires_grad_(True)
    with pytest.raises(ValueError, match=r"requires a gradient now.*float8_e4m3fn"):
        optimizer.step()


def test_one_that_is_unfrozen_is_refused():
    run(unfreeze, 2)
