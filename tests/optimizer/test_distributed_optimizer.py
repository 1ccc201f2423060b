# SPDX-License-Identifier: Apache-2.0
"""Losses of closures, ways to combine gradients, and the cost of a pass in Python."""

import sys

import numpy as np
import pytest
import torch
from pool import run
from torch import Tensor, nn
from torch.optim import SGD
from training import loss_of, train

import torch_ring as hvd


def return_losses() -> None:
    """The result of a closure is a loss of any numeric type, or refused."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=0.0))
    mine, mean = hvd.rank() + 3, (hvd.size() - 1) / 2 + 3
    for loss, expected in (
        (float(mine), mean),
        (np.float32(mine), np.float32(mean)),
        (torch.tensor(float(mine)), torch.tensor(mean)),
        # An average is not a whole number.
        (mine, mean),
        (np.int64(mine), mean),
        (np.array(float(mine)), mean),
        (torch.tensor(mine), torch.tensor(mean).double()),
        (None, None),
    ):
        found = optimizer.step(lambda loss=loss: loss)
        assert type(found) is type(expected)
        assert found == expected
    for wrong in ({"loss": 1.0}, (1.0, 2.0), "1.0", 1j):
        with pytest.raises(TypeError, match=f"as a tensor or a number.* {type(wrong).__name__}$"):
            optimizer.step(lambda wrong=wrong: wrong)


class TwoParts:
    """A user's compressor: sends the part that survives a cast, and drops the rest."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Tensor]:
        return tensor.to(torch.float16), tensor

    @staticmethod
    def decompress(tensor: Tensor, ctx: Tensor) -> Tensor:
        return tensor.to(ctx.dtype)


def check_options(options: dict[str, object], factor: float) -> None:
    """Check gradients that are exact in 16 bits: the result is exact as well."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=1.0), **options)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * torch.tensor([1.0, 2.0, 4.0]) * (hvd.rank() + 1)).sum().backward()
        total = hvd.size() * (hvd.size() + 1) / 2 * factor
        torch.testing.assert_close(weight.grad, torch.tensor([1.0, 2.0, 4.0]) * total)
        assert weight.grad.dtype == torch.float32
        optimizer.step()


def call_python_equally_often() -> None:
    """Python does nothing per parameter."""

    def calls_of_backward(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
        # Plans the buckets anew, and then compares weights once more.
        train(model, optimizer, [torch.ones(2, 4)] * 2)
        optimizer.zero_grad()
        loss = loss_of(model, torch.ones(2, 4))
        events: list[str] = []
        sys.setprofile(lambda _frame, event, _argument: events.append(event))
        loss.backward()
        sys.setprofile(None)
        return len(events)

    assert calls_of_backward(2) == calls_of_backward(60)


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (check_options, ({"gradient_predivide_factor": 4.0}, 1 / 2)),
        (check_options, ({"compression": hvd.Compression.bf16, "op": hvd.Sum}, 1)),
        (check_options, ({"compression": TwoParts}, 1 / 2)),
        (return_losses, ()),
        (call_python_equally_often, ()),
    ],
)
def test_distributed_optimizer(check, args):
    run(check, 2, args=args)
