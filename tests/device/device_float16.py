# SPDX-License-Identifier: Apache-2.0
"""Numbers of float16 whose sum overflows it, on any accelerator; called as device_operations are.

The host adds float16 in float32. NCCL adds in float16, so a mean must be divided before it is added
up: results that are finite on the host are finite there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from training import assert_same_on_all_ranks

import torch_ring as hvd

LARGE = 40_000.0  # the sum of two is more than 65504, the largest float16
UNIT = 32.0  # of float16 there


def assert_large(tensor: Tensor | None) -> None:
    assert tensor is not None
    assert (tensor.cpu().float() - LARGE).abs().max() <= 2 * UNIT, tensor


def average_float16(device: str) -> None:
    """Average large numbers in every way, and with factors that cancel one another."""
    size = hvd.size()
    mine = torch.full((1000,), LARGE, dtype=torch.float16, device=device)
    factors: list[dict[str, Any]] = [
        {},
        {"prescale_factor": 4.0, "postscale_factor": 0.25},  # 4 * LARGE overflows
        {"prescale_factor": 0.25, "postscale_factor": 4.0},
        {"op": hvd.Sum, "postscale_factor": 1 / size},
        {"op": hvd.Sum, "prescale_factor": 1 / size},
    ]
    for options in factors:
        assert_large(hvd.allreduce(mine, **options))
        fused = hvd.grouped_allreduce([mine, mine[:10], mine[:333]], **options)
        for result in fused:
            assert_large(result)
        assert_large(hvd.allreduce_(mine.clone(), **options))
    for rows in (3 * size, 3 * size + 1):  # shares of equal sizes, and of different ones
        assert_large(hvd.reducescatter(mine[:rows].view(rows, 1), op=hvd.Average))
    assert (mine == LARGE).all()
    wide = torch.full((1000,), LARGE, device=device)
    assert_large(hvd.allreduce(wide, compression=hvd.Compression.fp16))
    overflow = hvd.allreduce(mine, op=hvd.Sum)
    assert overflow.isinf().all() or size == 1


def train_with_large_gradients(device: str) -> None:
    """Average large gradients of float16, and gradients that are sent as float16."""
    for dtype, compression in (
        (torch.float16, hvd.Compression.none),
        (torch.float32, hvd.Compression.fp16),
    ):
        for predivide in (1.0, 2.0, float(hvd.size()), 64.0):
            weights = [nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in (5, 70)]
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(weights, lr=1.0),
                compression=compression,
                gradient_predivide_factor=predivide,
            )
            for _ in range(3):  # the last pass ends in C++
                optimizer.zero_grad()
                sum((weight * LARGE).sum() for weight in weights).backward()
                for weight in weights:
                    assert_large(weight.grad)
                assert_same_on_all_ranks(*(weight.grad.cpu() for weight in weights))


FLOAT16: list[Callable[[str], None]] = [average_float16, train_with_large_gradients]
