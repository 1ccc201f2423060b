# SPDX-License-Identifier: Apache-2.0
"""Parameters that are converted, replaced or added after their optimizer was wrapped."""

from unittest import mock

import pytest
import torch
from logs import logged
from pool import expect_error, run
from torch import nn
from torch.optim import SGD
from training import joined_batches, make_model, part, train, weights

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import BackwardSync
from torch_ring.optimizer.distributed_optimizer import follow_world


def mix_graphs() -> None:
    """Graphs from before and after a conversion add up in one parameter, each of them once."""
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0))
    factor = float(hvd.rank() + 1)
    for _ in range(3):
        optimizer.zero_grad()
        before = factor * x
        x.data = x.data.double()
        x.data = x.data.float()
        after = 10 * factor * x
        after.backward()
        assert x.grad.item() == 15
        before.backward()
        assert x.grad.item() == 16.5
        after = 10 * factor * x
        after.backward()
        assert x.grad.item() == 31.5
        optimizer.step()


def wrap_again_and_again() -> None:
    """Hooks of deleted optimizers neither accumulate on a parameter nor count."""
    model = make_model()
    for _ in range(3):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.0), op=hvd.Sum)
        for _ in range(2):
            optimizer.zero_grad()
            model.double().float()
            (model(torch.ones(1, 8)).sum() * 0 + model[0].bias.sum()).backward()
            assert torch.equal(model[0].bias.grad, torch.full((16,), 2.0))
            optimizer.step()


def replace_parameters() -> None:
    """torch refuses to replace the parameters of a wrapped optimizer; a warning comes before."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = make_model()
        with logged() as messages:
            optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
        assert len(messages) == (hvd.rank() == 0)
        assert all("set_swap_module_params_on_conversion(False)" in text for text in messages)
        with pytest.raises(RuntimeError, match="swap"):
            model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    train(model, optimizer, map(part, joined_batches(1)))


def change_shapes() -> None:
    model = nn.Linear(3, 4)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model.weight.data = torch.zeros(4, 3)  # other memory, the same shape
    optimizer.zero_grad()
    model(torch.ones(2, 3) * (hvd.rank() + 1)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 3), 3.0))
    optimizer.step()
    model.double()
    message = r"'weight' has changed its dtype from Float to Double .* convert the model first"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    model.float().weight.data = torch.zeros(5, 3)
    message = r"'weight' has changed its shape from \[4, 3\] to \[5, 3\] since .*: make a new"
    with pytest.raises(ValueError, match=message):
        optimizer.zero_grad()


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
    # A parameter replaces another one, as when layers are replaced.
    replaced, group["params"][1] = group["params"][1], other
    other.grad = torch.full_like(other, hvd.rank())
    for call in (optimizer.step, optimizer.synchronize):
        with pytest.raises(ValueError, match=r"^1 param.* The first is .*\[0\]\['params'\]\[1\]$"):
            call()
    assert other.item() == 1
    group["params"][1] = replaced
    train(model, optimizer, [batch])


def go_on_alone() -> None:
    """The others die while they change the parameters in a new world: the last rank can step."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    failure = hvd.PeerLostError("rank 1 died")
    with mock.patch.object(BackwardSync, "add", side_effect=failure):
        expect_error("PeerLostError", "rank 1 died", lambda: follow_world(optimizer))
    hvd.shutdown()
    hvd.init(rank=0, size=1)
    follow_world(optimizer)
    before = model[0].bias.detach().clone()
    train(model, optimizer, joined_batches(1))
    assert not torch.equal(model[0].bias, before)


@pytest.mark.parametrize(
    "check",
    [
        mix_graphs,
        wrap_again_and_again,
        replace_parameters,
        change_shapes,
        add_parameters_by_hand,
        go_on_alone,
    ],
)
def test_changed_parameters(check):
    run(check, 2)
