# SPDX-License-Identifier: Apache-2.0
"""Tensors in shared memory: they behave as other tensors do, and collectives do not move them."""

import pytest
import torch
from on_ranks import on_ranks
from worlds import on_most_worlds

import torch_ring as hvd


@on_most_worlds
@on_ranks()
def test_shared_tensors_are_reduced_in_place(transport, size) -> None:
    ranks = range(hvd.size())
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = hvd.empty_shared(300_007, dtype=dtype).fill_(hvd.rank() + 1)
        before = tensor.data_ptr()
        hvd.allreduce_(tensor, op=hvd.Sum)
        assert tensor.data_ptr() == before
        assert torch.equal(tensor, torch.full((300_007,), sum(ranks) + hvd.size(), dtype=dtype))
    # A part, an average, and another memory on one of the ranks.
    whole = hvd.empty_shared((1000, 10)).fill_(float(hvd.rank()))
    hvd.allreduce_(whole[100:900])
    assert torch.equal(whole[100:900], torch.full((800, 10), sum(ranks) / hvd.size()))
    assert torch.equal(whole[:100], torch.full((100, 10), float(hvd.rank())))
    mixed = torch.ones(50_000) if hvd.rank() == 0 else hvd.empty_shared(50_000).fill_(1.0)
    assert torch.equal(hvd.allreduce_(mixed, op=hvd.Sum), torch.full((50_000,), float(hvd.size())))


@on_ranks(2)
def test_shared_tensors_check_their_arguments_and_outlive_the_world() -> None:
    assert hvd.empty_shared(2).dtype == torch.get_default_dtype()
    for wrong in [(-1,), (2.5,)]:
        with pytest.raises((RuntimeError, TypeError)):
            hvd.empty_shared(*wrong)
    kept = hvd.empty_shared(1000, dtype=torch.int32).fill_(7)
    hvd.shutdown()
    assert int(kept.sum()) == 7000
    with pytest.raises(hvd.NotInitializedError):
        hvd.empty_shared(1)
