"""Grouped operations, sparse ones, and what completes together."""

from __future__ import annotations

import pytest
import torch
from pool import run

import torch_ring as hvd

on_all_worlds = pytest.mark.parametrize(
    ("transport", "size"), [("shm", 1), ("shm", 2), ("shm", 3), ("tcp", 2), ("tcp", 3)]
)


def groups() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = float(sum(range(size)))
    tensors = [torch.full((n,), float(rank)) for n in (1, 3_000, 0)]
    tensors.append(torch.full((2, 3), rank, dtype=torch.int32))
    for name in (None, "g"):
        summed = hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name)
        assert [t.shape for t in summed] == [t.shape for t in tensors]
        assert all((t == total).all() for t in summed)
    assert (hvd.grouped_allreduce(tensors[:2], average=True)[1] == total / size).all()
    halves = hvd.grouped_allreduce(tensors[:2], op=hvd.Sum, compression=hvd.Compression.fp16)
    assert halves[0].dtype == torch.float32
    copies = [t.clone() for t in tensors]
    handle = hvd.grouped_allreduce_async_(copies, op=hvd.Max)
    assert hvd.synchronize(handle)[0] is copies[0]
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is None
    assert (copies[1] == size - 1).all()
    assert hvd.grouped_allreduce_(copies, op=hvd.Min)[1] is copies[1]
    gathered = hvd.grouped_allgather([torch.full((rank, 2), rank), torch.tensor([rank])], name="h")
    assert gathered[1].tolist() == list(range(size))
    assert len(gathered[0]) == total
    assert hvd.grouped_allreduce((t for t in tensors[:2]), op=hvd.Sum)[1][0] == total
    for empty in (hvd.grouped_allreduce([]), hvd.grouped_allgather([]), hvd.grouped_allreduce_([])):
        assert empty == []


@on_all_worlds
def test_groups(transport, size):
    run(groups, size, transport=transport)


def fails_as_one() -> None:
    good, other = torch.ones(3), torch.ones(3 + hvd.rank())
    handle = hvd.grouped_allreduce_async([good, other], name="g")
    with pytest.raises(hvd.MismatchError, match=r"g\.1"):
        hvd.synchronize(handle)
    with pytest.raises(ValueError, match="ComplexFloat"):
        hvd.grouped_allreduce([good, good.to(torch.complex64)], name="g")  # the first is not sent
    assert hvd.grouped_allreduce([good], name="g", op=hvd.Sum)[0].tolist() == [2.0] * 3
    for wrong in (good, [good, 1]):
        with pytest.raises(ValueError, match="list of tensors"):
            hvd.grouped_allreduce(wrong)
    with pytest.raises(ValueError, match="several devices"):
        hvd.grouped_allreduce([good, torch.ones(1, device="meta")])


def test_a_group_fails_as_one_and_is_submitted_whole():
    run(fails_as_one, 2)


def reverse_order() -> None:
    names = [f"n{i}" for i in range(5)]
    if hvd.rank() == 1:
        names.reverse()
    handles = {
        name: hvd.grouped_allreduce_async([torch.full((4,), float(name[1]))] * 2, name=name)
        for name in names
    }
    for name in sorted(handles):
        assert all((t == float(name[1])).all() for t in hvd.synchronize(handles[name]))


def test_groups_are_matched_by_name():
    run(reverse_order, 2)


def has_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    x, y = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    a, b = hvd.grouped_allreduce([x, y], op=hvd.Sum)
    ((rank + 1) * (a.sum() + 2 * b.sum())).backward()
    weights = sum(range(1, size + 1))
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.tolist() == [weights] * 2
    assert y.grad.tolist() == [2 * weights]
    z = torch.ones(1 + rank, requires_grad=True)
    (gathered,) = hvd.grouped_allgather([z])
    ((rank + 1) * gathered.sum()).backward()
    assert z.grad is not None
    assert z.grad.tolist() == pytest.approx([weights / size] * (1 + rank))


@on_all_worlds
def test_gradients_of_groups(transport, size):
    run(has_gradients, size, transport=transport)


def sums_rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    # Every rank has row 0 and one of its own; the last has none at all.
    indices = [[0, rank + 1]] if rank < size - 1 else [[]]
    values = torch.full((len(indices[0]), 2), float(rank + 1))
    mine = torch.sparse_coo_tensor(torch.tensor(indices, dtype=torch.int64), values, (size + 1, 2))
    dense = hvd.allreduce(mine.to_dense())
    handle = hvd.sparse_allreduce_async(mine, name="embedding", op=hvd.Average)
    assert callable(handle)
    result = hvd.synchronize(handle)
    assert result.is_sparse
    assert not result.is_coalesced() or size == 1
    torch.testing.assert_close(result.to_dense(), dense)
    summed = hvd.sparse_allreduce_async(mine, "embedding", hvd.Sum)()
    torch.testing.assert_close(summed.to_dense(), dense * size)
    for wrong, op in ((torch.ones(2), hvd.Sum), (mine, hvd.Max)):
        with pytest.raises(ValueError, match="sparse"):
            hvd.sparse_allreduce_async(wrong, op=op)


@on_all_worlds
def test_sparse(transport, size):
    run(sums_rows, size, transport=transport)


def disagrees_about_rows() -> None:
    rank = hvd.rank()
    row = torch.tensor([[0]])
    ends = hvd.add_process_set([0, 2])
    if not ends.included():
        return
    for op, shape, sparse_dim, text in (
        (hvd.Sum, (2 + rank, 3), 1, "rank 0: Sum of [2, 3]; rank 2: Sum of [4, 3]"),
        (rank // 2, (2, 3), 1, "rank 0: Average of [2, 3]; rank 2: Sum of [2, 3]"),
        (hvd.Sum, (2, 3), 1 + rank // 2, "rank 0: allgather 'rows.1' float32 [*, 3]; rank 2: "),
        (hvd.Sum, (2, 3, 4)[rank // 2 :], 2 - rank // 2, "rank 0: Sum of [2, 3, 4]; rank 2: Sum"),
    ):
        values = torch.ones(1, *shape[sparse_dim:])
        mine = torch.sparse_coo_tensor(row.expand(sparse_dim, 1), values, shape)
        handle = hvd.sparse_allreduce_async(mine, "rows", op, ends)
        with pytest.raises(hvd.MismatchError) as error:
            handle()
        assert text in str(error.value)
    same = torch.sparse_coo_tensor(row, torch.ones(1), (1,))
    assert hvd.sparse_allreduce_async(same, "rows", hvd.Sum, ends)().to_dense().tolist() == [2.0]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_sparse_tensors_that_differ_are_refused_on_all_ranks(transport):
    run(disagrees_about_rows, 3, transport=transport)


def adapts() -> None:
    rank, size = hvd.rank(), hvd.size()
    parallel = hvd.allreduce(torch.tensor([3.0, 0.0]), op=hvd.Adasum)  # alike: their mean
    torch.testing.assert_close(parallel, torch.tensor([3.0, 0.0]))
    orthogonal = torch.zeros(size)
    orthogonal[rank] = 2.0  # at right angles: their sum
    torch.testing.assert_close(hvd.allreduce(orthogonal, op=hvd.Adasum), torch.full((size,), 2.0))
    many = [torch.full((5_000,), 2.0, dtype=torch.bfloat16), torch.full((3,), 4.0).bfloat16()]
    for got, want in zip(hvd.grouped_allreduce(many, op=hvd.Adasum), many, strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="floating point"):
        hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Adasum)


@pytest.mark.parametrize(("transport", "size"), [("shm", 1), ("shm", 2), ("shm", 4), ("tcp", 4)])
def test_adasum(transport, size):
    run(adapts, size, transport=transport)


def needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two of ranks, not 3"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)


def test_adasum_among_three():
    run(needs_a_power_of_two, 3)
