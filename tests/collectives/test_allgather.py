"""allgather() of ranks with different numbers of rows."""

import torch
from closed_form import NUMBERS, tensor_of
from pool import run
from worlds import on_all_worlds

import torch_ring as hvd


def check_allgather() -> None:
    size = hvd.size()
    for dtype in [*NUMBERS, torch.bool]:
        for rest in [(), (3,), (2, 0), (257, 5)]:
            for rows in ([1] * size, list(range(size)), [0] * size, [700, *[3] * (size - 1)]):
                parts = [tensor_of(r, (rows[r], *rest), dtype, size) for r in range(size)]
                assert torch.equal(hvd.allgather(parts[hvd.rank()]), torch.cat(parts))


@on_all_worlds
def test_allgather(transport, size):
    run(check_allgather, size, transport=transport)


def gather_large_tensors() -> None:
    """Gather results of more than 32 MiB, which ask for huge pages, of no round size."""
    rows = torch.arange(5_000_001, dtype=torch.float32)
    gathered = hvd.allgather(rows)
    assert gathered.nbytes > 32 << 20
    assert all(torch.equal(part, rows) for part in gathered.view(hvd.size(), -1))
    doubled = torch.cat([rows, rows])
    assert torch.equal(hvd.allreduce(doubled), doubled)


def test_allgather_of_large_tensors():
    run(gather_large_tensors, 2)
