"""Grouped collectives: tensors that are submitted and complete together."""

from __future__ import annotations

import pytest
import torch
from pool import run
from worlds import on_both_transports, on_most_worlds

import torch_ring as hvd


def check_groups() -> None:
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


@on_most_worlds
def test_groups(transport, size):
    run(check_groups, size, transport=transport)


def fail_as_one() -> None:
    good, other = torch.ones(3), torch.ones(3 + hvd.rank())
    handle = hvd.grouped_allreduce_async([good, other], name="g")
    with pytest.raises(hvd.MismatchError, match=r"g\.1"):
        hvd.synchronize(handle)
    with pytest.raises(ValueError, match="complex64"):
        hvd.grouped_allreduce([good, good.to(torch.complex64)], name="g")  # the first is not sent
    assert hvd.grouped_allreduce([good], name="g", op=hvd.Sum)[0].tolist() == [2.0] * 3
    for wrong in (good, [good, 1]):
        with pytest.raises(ValueError, match="list of tensors"):
            hvd.grouped_allreduce(wrong)
    with pytest.raises(ValueError, match="several devices"):
        hvd.grouped_allreduce([good, torch.ones(1, device="meta")])


def test_a_group_is_submitted_and_fails_as_one():
    run(fail_as_one, 2)


def disagree_about_the_size() -> None:
    for name in (None, "g"):
        tensors = [torch.ones(3)] * (2 + hvd.rank())
        with pytest.raises(hvd.MismatchError, match=r"in a group of 2; rank 1: .* a group of 3\."):
            hvd.grouped_allreduce(tensors, name=name)
        with pytest.raises(hvd.MismatchError, match="in a group of 2;"):
            hvd.grouped_allgather(tensors, name=name)
        with pytest.raises(hvd.MismatchError, match="in a group of 2;"):
            hvd.synchronize(hvd.grouped_allreduce_async(tensors, name=name))
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3  # the next innocent
    alone, group = hvd.allreduce, hvd.grouped_allreduce
    with pytest.raises(hvd.MismatchError, match=r"rank 1: allreduce '#\d+.* in a group of 3\."):
        alone(torch.ones(3)) if hvd.rank() == 0 else group([torch.ones(3)] * 3)
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
    assert hvd.grouped_allreduce([torch.ones(1)] * 3, op=hvd.Sum)[2].item() == 2


@on_both_transports
def test_groups_of_different_sizes_are_refused_in_their_call(transport):
    run(disagree_about_the_size, 2, transport=transport)


def disagree_about_a_long_group() -> None:
    """The members of the longer groups take several rounds to announce."""
    names = 300 + 100 * hvd.rank()
    with pytest.raises(hvd.MismatchError, match="in a group of 300;"):
        hvd.grouped_allreduce([torch.ones(1)] * names, name="long" * 200)
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3


@on_both_transports
def test_long_groups_of_different_sizes_are_refused_in_their_call(transport):
    run(disagree_about_a_long_group, 3, transport=transport)


def submit_in_reverse_order() -> None:
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
    run(submit_in_reverse_order, 2)


def check_gradients() -> None:
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


@on_most_worlds
def test_gradients_of_groups(transport, size):
    run(check_gradients, size, transport=transport)
