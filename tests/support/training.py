# SPDX-License-Identifier: Apache-2.0
"""A model, batches and comparisons for tests of training."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torch_ring as hvd

ROWS = 6  # of a rank's part of a batch
FEATURES = 8


def make_model(seed: int = 1) -> nn.Module:
    """Return a small net, the same for the same seed. Its 227 weights fill no round number."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 4), nn.Linear(4, 3))


def joined_batches(steps: int) -> list[Tensor]:
    """Return the joined batches of all ranks."""
    generator = torch.Generator().manual_seed(7)
    return list(torch.randn(steps, ROWS * hvd.size(), FEATURES, generator=generator))


class FailingBackward(torch.autograd.Function):
    """Identity with a backward that raises `error`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, error: Exception | None = None) -> Tensor:
        ctx.error = error or RuntimeError("out of luck")
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Tensor:
        raise ctx.error


def part(batch: Tensor) -> Tensor:
    """Return this rank's part of a joined batch."""
    return batch[hvd.rank() :: hvd.size()]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a mean over rows, so that the means of equal parts average to the loss of all."""
    return model(batch).square().mean() + model(batch).sum(1).mean()


def take_step(optimizer: Optimizer, loss: Tensor) -> None:
    """Take a step on a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Tensor],
    set_to_none: bool = True,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    """Take one step with each batch."""
    for batch in batches:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch).backward()
        before_step()
        optimizer.step()


def weights(*values: float) -> list[nn.Parameter]:
    """Return parameters of one element."""
    return [nn.Parameter(torch.tensor([float(value)])) for value in values]


def grads(parameters: list[nn.Parameter]) -> list[float | None]:
    """Return the gradients of such parameters."""
    return [None if p.grad is None else p.grad.item() for p in parameters]


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    """Compare the weights of two models up to rounding."""
    for (name, weight), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            weight, other, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_on_all_ranks(*tensors: Tensor | None) -> None:
    """Compare tensors with all other ranks', bit by bit."""
    mine = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
    for other in hvd.allgather_object(mine):
        assert len(other) == len(mine)
        for ours, theirs in zip(mine, other, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
