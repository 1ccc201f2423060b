"""Gradients of collectives, and autograd's view of operations in place."""

import pytest
import torch
from pool import error_of, run
from worlds import on_all_worlds

import torch_ring as hvd


def check_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()
    x = torch.full((3,), float(rank + 1), requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).mul(rank + 1.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [size * (size + 1) / 2] * 3

    y = torch.ones(2, requires_grad=True)
    hvd.broadcast(y, root_rank=0).mul(rank + 1.0).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [(size + 1) / 2 if rank == 0 else 0.0] * 2

    z = torch.ones(rank + 1, 2, requires_grad=True)
    gathered = hvd.allgather(z)
    weights = torch.arange(float(gathered.numel())).reshape(gathered.shape)
    (gathered * weights * (rank + 1.0)).sum().backward()
    begin = rank * (rank + 1) // 2
    assert z.grad is not None
    torch.testing.assert_close(z.grad, weights[begin : begin + rank + 1] * (size + 1) / 2)


@on_all_worlds
def test_gradients(transport, size):
    run(check_gradients, size, transport=transport)


def check_version_counter() -> None:
    """A tensor saved by autograd must not change unnoticed."""
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    square = y * y
    hvd.allreduce_(y.detach(), op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_autograd_notices_operations_in_place():
    run(check_version_counter, 2)


def refuse_other_operators() -> None:
    x = torch.ones(2, requires_grad=True)
    for call in (
        lambda: hvd.allgather(x, grad_op=hvd.Max),
        lambda: hvd.grouped_allgather([x], grad_op=hvd.Product),
    ):
        kind, text = error_of(call)
        assert kind == "InvalidArgumentError"
        assert "grad_op must be hvd.Average or hvd.Sum" in text


def test_gradients_of_a_gather_are_averaged_or_summed():
    run(refuse_other_operators, 2)
