"""Tensors that are not contiguous, or whose values are not in their memory."""

import torch
from pool import run
from worlds import on_all_worlds

import torch_ring as hvd


def check_layouts() -> None:
    size, rank = hvd.size(), hvd.rank()
    base = torch.arange(24.0).reshape(4, 6) + rank
    mean = torch.arange(24.0).reshape(4, 6) + (size - 1) / 2
    for view in (lambda t: t.t(), lambda t: t[::2, 1::2], lambda t: t[1].expand(3, 6)):
        torch.testing.assert_close(hvd.allreduce(view(base)), view(mean))
    inplace = base.clone()
    hvd.allreduce_(inplace.t())
    torch.testing.assert_close(inplace, mean)
    part = base.clone()
    hvd.broadcast_(part[:, ::2], root_rank=size - 1)
    torch.testing.assert_close(part[:, ::2], (base - rank + size - 1)[:, ::2])
    assert torch.equal(part[:, 1::2], base[:, 1::2])
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    same = hvd.broadcast(image, root_rank=0)
    torch.testing.assert_close(hvd.allreduce(same), same)
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert hvd.broadcast_(parameter, root_rank=0) is parameter
    assert parameter.tolist() == [0.0] * 3
    assert parameter.requires_grad


@on_all_worlds
def test_layouts(transport, size):
    run(check_layouts, size, transport=transport)


def check_lazy_values() -> None:
    """A tensor may be the negative of its memory, or zero without any memory."""
    size, numbers = hvd.size(), torch.arange(1.0, 3.0)
    conjugate = torch.tensor([2 + 3j]).conj()
    for tensor, expected in [
        (conjugate.imag, [-3.0]),
        (torch._neg_view(numbers), [-1.0, -2.0]),
        (torch._neg_view(numbers.repeat_interleave(2)[::2]), [-1.0, -2.0]),
        (torch._efficientzerotensor((2,)), [0.0, 0.0]),
    ]:
        rows = torch._neg_view(-torch.tensor(expected).repeat(size))
        for result, times in [
            (hvd.allreduce(tensor, op=hvd.Max), 1),
            (hvd.grouped_allreduce([tensor])[0], 1),
            (hvd.broadcast(tensor, 0), 1),
            (hvd.allgather(tensor), size),
            (hvd.alltoall(rows), size),
            (hvd.reducescatter(rows), 1),
        ]:
            assert result.tolist() == expected * times
    negative = torch._neg_view(torch.arange(3.0) + hvd.rank())
    assert hvd.allreduce_(negative, op=hvd.Max).tolist() == [0.0, -1.0, -2.0]


@on_all_worlds
def test_lazily_negated_and_zero_tensors(transport, size):
    run(check_lazy_values, size, transport=transport)
