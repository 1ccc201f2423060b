# SPDX-License-Identifier: Apache-2.0
"""allreduce() with op=Adasum."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks

import torch_ring as hvd


@pytest.mark.parametrize(("transport", "size"), [("shm", 1), ("shm", 4), ("tcp", 2)])
@on_ranks()
def test_adasum(transport, size) -> None:
    rank = hvd.rank()
    parallel = hvd.allreduce(torch.tensor([3.0, 0.0]), op=hvd.Adasum)  # parallel: their mean
    torch.testing.assert_close(parallel, torch.tensor([3.0, 0.0]))
    orthogonal = torch.zeros(size)
    orthogonal[rank] = 2.0  # orthogonal: their sum
    torch.testing.assert_close(hvd.allreduce(orthogonal, op=hvd.Adasum), torch.full((size,), 2.0))
    many = [torch.full((5_000,), 2.0, dtype=torch.bfloat16), torch.full((3,), 4.0).bfloat16()]
    for got, want in zip(hvd.grouped_allreduce(many, op=hvd.Adasum), many, strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="floating point"):
        hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Adasum)


@on_ranks(3)
def test_adasum_needs_a_power_of_two_of_ranks() -> None:
    with pytest.raises(ValueError, match="power of two of ranks, not 3"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
