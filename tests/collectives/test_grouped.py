# SPDX-License-Identifier: Apache-2.0
"""Grouped collectives: tensors that are submitted and complete together."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from worlds import on_most_worlds

import torch_ring as hvd


@on_most_worlds
@on_ranks()
def test_groups(transport, size) -> None:
    rank = hvd.rank()
    total = float(sum(range(size)))
    tensors = [torch.full((n,), float(rank)) for n in (1, 3_000, 0)]
    tensors.append(torch.full((2, 3), rank, dtype=torch.int32))
    for name in (None, "g"):
        summed = hvd.grouped_allreduce((t for t in tensors), op=hvd.Sum, name=name)
        assert [t.shape for t in summed] == [t.shape for t in tensors]
        assert all((t == total).all() for t in summed)
    assert (hvd.grouped_allreduce(tensors[:2], average=True)[1] == total / size).all()
    halves = hvd.grouped_allreduce(tensors[:2], op=hvd.Sum, compression=hvd.Compression.fp16)
    assert halves[0].dtype == torch.float32
    handle = hvd.grouped_allreduce_async_([t.clone() for t in tensors], op=hvd.Max)
    assert (hvd.synchronize(handle)[1] == size - 1).all()
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is None
    gathered = hvd.grouped_allgather([torch.full((rank, 2), rank), torch.tensor([rank])], name="h")
    assert gathered[1].tolist() == list(range(size))
    assert len(gathered[0]) == total
    many = hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size, 2)], op=hvd.Sum)
    assert [tuple(t.shape) for t in many] == [(1,), (2, 2)]
    for empty in (hvd.grouped_allreduce([]), hvd.grouped_allgather([]), hvd.grouped_allreduce_([])):
        assert empty == []
    names = [f"n{i}" for i in range(5)]
    handles = {
        name: hvd.grouped_allreduce_async([torch.full((4,), float(name[1]))] * 2, name=name)
        for name in (names if rank != 1 else reversed(names))
    }
    for name in names:
        assert all((t == float(name[1])).all() for t in hvd.synchronize(handles[name])), name


@on_ranks(2)
def test_a_group_raises_its_first_failure() -> None:
    unlike = torch.ones(2 + hvd.rank())
    handle = hvd.grouped_allreduce_async([torch.ones(1), unlike, unlike], name="of three")
    with pytest.raises(hvd.MismatchError, match=r"of three\.1"):
        hvd.synchronize(handle)
    assert hvd.allreduce(torch.ones(1)).item() == 1
