"""How far a backward pass is, in words."""

from __future__ import annotations

import pytest
import torch

from torch_ring.optimizer.buckets import TensorSpec, plan_buckets
from torch_ring.optimizer.pass_progress import next_gradient

NAMES = [f"layer{i}" for i in range(6)]
SPECS = [TensorSpec(100, torch.float32, torch.device("cpu"))] * 6
PLAN = plan_buckets(SPECS, [5, 4, 3, 2, 1, 0], 1100, 1100)  # two in each


@pytest.mark.parametrize(
    ("ready", "next_one"),
    [
        ([], "the gradient of 'layer5' in bucket 0 of optimizer 3"),
        ([5], "the gradient of 'layer4' in bucket 0 of optimizer 3"),
        ([5, 4], "the gradient of 'layer3' in bucket 1 of optimizer 3"),
        ([4, 5], "the gradient of 'layer3' in bucket 1 of optimizer 3"),  # in another order
        ([5, 3], "the gradient of 'layer2' in bucket 1 of optimizer 3"),  # 'layer4' is not used
        ([5, 4, 3, 2, 1, 0], "the end of the pass"),
        ([5, 4, 3, 2, 0], "the end of the pass"),
    ],
)
def test_the_next_gradient_is_named(ready: list[int], next_one: str) -> None:
    assert len(PLAN) == 3
    assert next_gradient(3, PLAN, ready, NAMES) == next_one
