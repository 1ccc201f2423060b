"""Every collective in a process set: only members take part, in the order of their ranks."""

from collections.abc import Callable

import pytest
import torch
from pool import run
from torch import Tensor

import torch_ring as hvd

on_larger_worlds = pytest.mark.parametrize(
    ("transport", "size"), [("shm", 3), ("tcp", 3), ("tcp", 4)]
)


def added_ends() -> hvd.ProcessSet:
    """Return the set of the first and the last rank, which are not neighbours in the world."""
    return hvd.add_process_set([hvd.size() - 1, 0])


def check_results_of_members() -> None:
    ends, rank, last = added_ends(), hvd.rank(), hvd.size() - 1
    if not ends.included():
        return
    index = ends.rank()
    mine = torch.full((2, 3), float(rank))
    assert torch.equal(hvd.allreduce(mine, process_set=ends), torch.full((2, 3), last / 2))
    assert torch.equal(
        hvd.reducescatter(mine, op=hvd.Sum, process_set=ends), torch.full((1, 3), float(last))
    )
    assert hvd.allgather(mine[:, 0], process_set=ends).tolist() == [0.0, 0.0, last, last]
    exchanged, counts = hvd.alltoall(torch.tensor([rank, -1, -1]), [1, 2], process_set=ends)
    assert exchanged.tolist() == ([0, last] if index == 0 else [-1] * 4)
    assert counts.tolist() == [1 + index] * 2
    for root in (0, last):  # as the world counts
        assert hvd.broadcast(mine, root, process_set=ends)[0, 0] == root
        assert hvd.broadcast_object(rank, root, process_set=ends) == root
        tensor = torch.tensor([rank])
        hvd.broadcast_parameters({"t": tensor}, root, process_set=ends)
        assert tensor.item() == root
        optimizer = torch.optim.SGD([torch.nn.Parameter(mine)], lr=float(1 + rank))
        hvd.broadcast_optimizer_state(optimizer, root, process_set=ends)
        assert optimizer.param_groups[0]["lr"] == 1 + root
    assert hvd.allgather_object(rank, process_set=ends) == [0, last]
    assert hvd.grouped_allreduce([mine], op=hvd.Max, process_set=ends)[0][0, 0] == last
    assert hvd.grouped_allgather([mine], process_set=ends)[0][:, 0].tolist() == [0, 0, last, last]
    assert hvd.grouped_reducescatter([mine], process_set=ends)[0].tolist() == [[last / 2] * 3]
    row = torch.sparse_coo_tensor([[index]], [2.0], (2,))
    assert hvd.sparse_allreduce_async(row, process_set=ends)().to_dense().tolist() == [1.0, 1.0]
    hvd.barrier(process_set=ends)


@on_larger_worlds
def test_results_of_members(transport, size):
    run(check_results_of_members, size, transport=transport)


def gradient_of(fn: Callable[[Tensor], Tensor], x: Tensor, weight: float) -> list[float]:
    x.requires_grad_()
    result = fn(x)
    (result * torch.arange(1.0, 1.0 + result.numel()) * weight).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def check_gradients() -> None:
    """The members weigh their results with 1 and 2, and element i with i + 1."""
    ends = added_ends()
    if not ends.included():
        return
    index, last = ends.rank(), hvd.size() - 1
    for fn, rows, want in (
        (lambda x: hvd.allreduce(x, process_set=ends), 2, [[1.5, 3.0], [1.5, 3.0]]),
        (lambda x: hvd.broadcast(x, last, process_set=ends), 2, [[0.0, 0.0], [1.5, 3.0]]),
        (lambda x: hvd.allgather(x, process_set=ends), 1 + index, [[1.5], [3.0, 4.5]]),
        (
            lambda x: hvd.grouped_allgather([x], process_set=ends)[0],
            1 + index,
            [[1.5], [3.0, 4.5]],
        ),
        (lambda x: hvd.grouped_allreduce([x], process_set=ends)[0], 1, [[1.5], [1.5]]),
        (
            lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=ends),
            3,
            [[2.0, 4.0, 4.0], [2.0, 4.0, 4.0]],
        ),
        (
            lambda x: hvd.grouped_reducescatter([x], process_set=ends)[0],
            3,
            [[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]],
        ),
        (lambda x: hvd.alltoall(x, process_set=ends), 2, [[1.0, 2.0], [2.0, 4.0]]),
    ):
        assert gradient_of(fn, torch.ones(rows), 1.0 + index) == want[index]


@on_larger_worlds
def test_gradients(transport, size):
    run(check_gradients, size, transport=transport)


def check_refusals() -> None:
    ends = added_ends()
    x, rows = torch.ones(2), torch.sparse_coo_tensor([[0]], [1.0], (2,))
    calls: list[Callable[[hvd.ProcessSet], object]] = [
        lambda s: hvd.allreduce(x, process_set=s),
        lambda s: hvd.allreduce_(x, process_set=s),
        lambda s: hvd.allreduce_async(x, process_set=s),
        lambda s: hvd.broadcast(x, 0, process_set=s),
        lambda s: hvd.broadcast_async_(x, 0, process_set=s),
        lambda s: hvd.allgather(x, process_set=s),
        lambda s: hvd.alltoall(x, process_set=s),
        lambda s: hvd.alltoall_async(x, process_set=s),
        lambda s: hvd.reducescatter(x, process_set=s),
        lambda s: hvd.grouped_allreduce([x], process_set=s),
        lambda s: hvd.grouped_allreduce_([x], process_set=s),
        lambda s: hvd.grouped_allgather([x], process_set=s),
        lambda s: hvd.grouped_reducescatter([x], process_set=s),
        lambda s: hvd.sparse_allreduce_async(rows, process_set=s),
        lambda s: hvd.broadcast_object(1, 0, process_set=s),
        lambda s: hvd.allgather_object(1, process_set=s),
        lambda s: hvd.broadcast_parameters([x], 0, process_set=s),
        lambda s: hvd.barrier(process_set=s),
    ]
    strangers = [hvd.ProcessSet([0]), *([] if ends.included() else [ends])]
    for call in calls:
        for stranger in strangers:
            with pytest.raises(ValueError, match=r"has not been added|is not in"):
                call(stranger)
        with pytest.raises(ValueError, match="is not a ProcessSet"):
            call([0, 1])  # type: ignore[arg-type]
    if ends.included():
        for root_call in (hvd.broadcast, hvd.broadcast_async_):
            with pytest.raises(ValueError, match="root_rank=1 is not in"):
                root_call(x, 1, process_set=ends)
        assert hvd.allreduce(x, op=hvd.Sum, process_set=ends).tolist() == [2.0, 2.0]
    assert hvd.allreduce(x, op=hvd.Min).tolist() == [1.0, 1.0]  # nothing was sent


def test_ranks_outside_a_set_are_refused():
    run(check_refusals, 3)
