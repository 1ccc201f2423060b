# SPDX-License-Identifier: Apache-2.0
"""Asynchronous operations and their handles."""

import pytest
import torch
from on_ranks import on_ranks
from worlds import on_most_worlds

import torch_ring as hvd
from torch_ring.tracing.counters import snapshot


@on_most_worlds
@on_ranks()
def test_handles_in_any_order(transport, size) -> None:
    tensors = [torch.full((i * 7 % 50,), float(i)) for i in range(500)]
    order = range(500) if hvd.rank() == 0 else reversed(range(500))
    handles = {i: hvd.allreduce_async(tensors[i], name=f"t{i}", op=hvd.Sum) for i in order}
    for i, tensor in enumerate(tensors):
        assert torch.equal(hvd.synchronize(handles[i]), tensor * size)
        assert hvd.synchronize(handles[i]) is None
    handle = hvd.allreduce_async_(tensors[9], name="t9")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle) is tensors[9]
    with pytest.raises(ValueError, match="is not a handle"):
        hvd.poll(17)  # type: ignore[arg-type]
    hvd.barrier()


@on_ranks(2, env={"TORCH_RING_FUSION_WINDOW": "500"})
def test_operations_that_differ_are_not_reduced_together() -> None:
    """Operations in flight together that differ in operator, factor or dtype, twice each."""
    size, rank = hvd.size(), hvd.rank()
    ones = torch.ones(2000)  # too long to travel with the agreement
    kinds = [
        (ones * rank, hvd.Sum, 1.0, size * (size - 1) / 2),
        (ones * rank, hvd.Max, 1.0, size - 1),
        (ones * rank, hvd.Min, 1.0, 0),
        (ones * 2, hvd.Average, 1.0, 2),
        (ones * 2, hvd.Sum, 0.5, size),
        (ones.double() * 2, hvd.Sum, 1.0, 2 * size),
    ]
    handles = [
        hvd.allreduce_async(tensor, op=op, prescale_factor=factor)
        for _ in range(2)
        for tensor, op, factor, _ in kinds
    ]
    for handle, (_, _, _, expected) in zip(handles, kinds * 2, strict=True):
        assert hvd.synchronize(handle).eq(expected).all()
    fused = snapshot().sets[0].fused
    assert fused == len(handles), fused
