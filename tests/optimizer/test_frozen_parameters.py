"""Frozen parameters whose dtype has no gradients: quantised weights."""

import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from training import assert_same_weights

import torch_ring as hvd


class Quantised(nn.Module):
    """A layer on top of frozen weights in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        frozen = torch.arange(12, dtype=torch.int8).view(3, 4)
        self.quantised = nn.Parameter(frozen, requires_grad=False)
        self.counts = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
        low = torch.full((3,), 0.5).to(torch.float8_e4m3fn)
        self.low = nn.Parameter(low, requires_grad=False)
        self.top = nn.Linear(3, 2)
        with torch.no_grad():
            self.top.weight.fill_(0.1)
            self.top.bias.zero_()

    def forward(self, batch: Tensor) -> Tensor:
        return self.top(batch @ self.quantised.float().t() + self.low.float())


def train_on_top(options: dict[str, object]) -> None:
    together, alone = Quantised(), Quantised()
    optimizer = SGD(together.parameters(), lr=0.01, momentum=0.9)
    if "groups" in options:
        options = {"groups": [list(together.parameters())]}
    hvd.DistributedOptimizer(optimizer, together.named_parameters(), **options)
    hvd.broadcast_parameters({"q": together.quantised, "n": together.counts}, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    reference = SGD(alone.parameters(), lr=0.01, momentum=0.9)
    for step in range(3):
        batch = torch.arange(4.0 * hvd.size()).view(-1, 4) / (step + 1)
        for model, opt, rows in (
            (alone, reference, batch),
            (together, optimizer, batch[hvd.rank() :: hvd.size()]),
        ):
            opt.zero_grad()
            model(rows).square().mean().backward()
            opt.step()
    assert_same_weights(together.top, alone.top)
    assert torch.equal(together.quantised, alone.quantised)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # now with a state


@pytest.mark.parametrize("options", [{}, {"groups": "all"}, {"groups": 1}, {"op": hvd.Adasum}])
def test_a_model_with_quantised_parameters(options):
    if options.get("op") == hvd.Adasum:
        run(train_on_top, 1, args=(options,))  # the mean of two ranks' gradients is no Adasum
        run(wrap_for_adasum, 2)
    else:
        run(train_on_top, 2, args=(options,))


def wrap_for_adasum() -> None:
    model = Quantised()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.01), op=hvd.Adasum)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def unfreeze() -> None:
    model = Quantised()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.01))
    optimizer.step()
    model.low.requires_grad_(True)
    with pytest.raises(ValueError, match=r"requires a gradient now.*float8_e4m3fn"):
        optimizer.step()


def test_one_that_is_unfrozen_is_refused():
    run(unfreeze, 2)
