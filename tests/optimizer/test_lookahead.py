"""Lookahead around a wrapped optimizer: it averages with slow weights after every k steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from pool import run
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from training import assert_same_weights, joined_batches, loss_of, make_model, part
from worlds import on_both_transports

import torch_ring as hvd

STEPS, PASSES = 7, 2
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: Adam(parameters, lr=0.01),
}


class Lookahead(Optimizer):
    """As the one of lookahead.pytorch: it shares the groups, and moves the weights by `.data`."""

    def __init__(self, optimizer: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    slow: Tensor = self.state[fast].setdefault("slow", fast.data.clone())
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def train_with_lookahead(maker: str, set_to_none: bool) -> None:
    """Two passes a step; one process on the whole batch must come to the same weights."""
    alone, together = make_model().double(), make_model().double()
    inner = hvd.DistributedOptimizer(
        MAKERS[maker](together.parameters()), backward_passes_per_step=PASSES
    )
    optimizer, reference = Lookahead(inner), Lookahead(MAKERS[maker](alone.parameters()))
    batches = [batch.double() for batch in joined_batches(STEPS * PASSES)]
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        reference.zero_grad(set_to_none)
        for batch in batches[step * PASSES : (step + 1) * PASSES]:
            loss_of(together, part(batch)).backward()
            loss_of(alone, batch).backward()
        optimizer.step()
        reference.step()
        assert_same_weights(together, alone)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("maker", MAKERS)
@on_both_transports
def test_lookahead_around_a_wrapped_optimizer(
    transport: str, maker: str, set_to_none: bool
) -> None:
    run(train_with_lookahead, 2, args=(maker, set_to_none), transport=transport)
