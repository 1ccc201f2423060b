"""broadcast() of every dtype and shape, from every root."""

import torch
from closed_form import NUMBERS, shapes_of, tensor_of
from pool import run
from worlds import on_all_worlds

import torch_ring as hvd


def check_broadcast() -> None:
    for dtype in [*NUMBERS, torch.bool]:
        for shape in shapes_of(dtype):
            for root in range(hvd.size()):
                mine = tensor_of(hvd.rank(), shape, dtype, hvd.size())
                want = tensor_of(root, shape, dtype, hvd.size())
                assert torch.equal(hvd.broadcast(mine, root), want)
                assert torch.equal(mine, tensor_of(hvd.rank(), shape, dtype, hvd.size()))
                assert hvd.broadcast_(mine, root) is mine
                assert torch.equal(mine, want)


@on_all_worlds
def test_broadcast(transport, size):
    run(check_broadcast, size, transport=transport)
