"""Parameters that are added to a wrapped optimizer."""

import pytest
import torch
from pool import run
from torch import nn
from torch.optim import SGD
from training import joined_batches, make_model, part, train

import torch_ring as hvd


def add_parameters_by_hand() -> None:
    """An unknown parameter is an error, a removed one is not."""
    model, other = make_model(), nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    batch = part(joined_batches(steps=1)[0])
    group = optimizer.param_groups[0]
    group["params"] = group["params"][1:]
    train(model, optimizer, [batch])
    for parameters in ([*group["params"], other], [*group["params"][1:], other]):
        group["params"][:] = parameters
        group["params"] = group["params"].copy()
        with pytest.raises(ValueError, match=r"^1 parameters .* add_param_group\(\)"):
            train(model, optimizer, [batch])
    group["params"].pop()
    train(model, optimizer, [batch])
    # A parameter replaces another one, as when layers are replaced, and takes over its state.
    replaced = group["params"][1]
    optimizer.state[other] = optimizer.state.pop(replaced, {})
    group["params"][1] = other
    other.grad = torch.full_like(other, hvd.rank())
    for call in (optimizer.step, optimizer.synchronize):
        with pytest.raises(ValueError, match=r"^1 param.* The first is .*\[0\]\['params'\]\[1\]$"):
            call()
    assert other.item() == 1
    group["params"][1] = replaced
    train(model, optimizer, [batch])


def add_parameters_in_a_closure() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(SGD([a], lr=1.0))
    before = optimizer._reducer

    def closure():
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [b], "lr": 2.0})
        optimizer.zero_grad()
        loss = (hvd.rank() + 1) * (a + b)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    assert before.nothing_pending  # otherwise the reduction of its gradients would never end
    optimizer._backward_sync.reduce_pending(before)
    assert losses == [1.5 * 2, 1.5 * (2 - 1.5 - 3)]
    assert (a.item(), b.item()) == (1 - 2 * 1.5, 1 - 2 * 3)


@pytest.mark.parametrize("check", [add_parameters_by_hand, add_parameters_in_a_closure])
def test_added_parameters(check):
    run(check, 2)
