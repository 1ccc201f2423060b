"""join(): ranks that run out of data before the others."""

from __future__ import annotations

import pytest
import torch
from pool import run

import torch_ring as hvd

on_all_worlds = pytest.mark.parametrize(
    ("transport", "size"), [("shm", 1), ("shm", 2), ("shm", 3), ("tcp", 2), ("tcp", 3)]
)


def runs_out() -> None:
    rank, size = hvd.rank(), hvd.size()
    for _ in range(2):  # again, with another numbering behind
        for step in range(rank + 1):
            here = size - step  # the ranks that have not joined
            for count in (3, 50_000):  # with the agreement, and after it
                ones = torch.ones(count, dtype=torch.int64)
                assert hvd.allreduce(ones, op=hvd.Sum).sum() == here * count
                assert hvd.allreduce(2 * ones, op=hvd.Product)[0] == 2**here
                assert hvd.allreduce(-ones, op=hvd.Max)[0] == -1  # no zeros among them
                assert hvd.allreduce(ones.to(torch.bfloat16), op=hvd.Min)[0] == 1
                average = hvd.allreduce(ones.double(), name=f"{step}.{count}")
                assert average[0].item() == pytest.approx(here / size)  # of all, as in Horovod
            sums = hvd.grouped_allreduce([torch.ones(2), torch.ones(5_000)], op=hvd.Sum)
            assert [t[0].item() for t in sums] == [here, here]
        assert hvd.join() == size - 1
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        assert hvd.allgather(torch.ones(1)).numel() == size
    hvd.barrier()


@on_all_worlds
def test_ranks_join_in_turn(transport, size):
    run(runs_out, size, transport=transport)


def calls_what_needs_all() -> None:
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1))  # the others are one operation behind in their numbering
        assert hvd.join() in range(hvd.size())
    else:
        hvd.allreduce(torch.ones(1))
        for operation in (
            lambda: hvd.allgather(torch.ones(2)),
            lambda: hvd.broadcast(torch.ones(2), 1),
            lambda: hvd.alltoall(torch.ones(hvd.size())),
            lambda: hvd.reducescatter(torch.ones(2)),
            hvd.barrier,
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Min, prescale_factor=2.0),
        ):
            with pytest.raises(hvd.MismatchError, match=r"called join\(\): rank 0"):
                operation()
        hvd.join()
    hvd.allreduce(torch.ones(2), name="after")
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == hvd.size()


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 3), ("tcp", 3)])
def test_what_needs_every_rank_fails_where_it_is_called(transport, size):
    run(calls_what_needs_all, size, transport=transport)


def numbers_differ() -> None:
    if hvd.rank() == 0:
        with pytest.raises(hvd.MismatchError, match="different collectives"):
            hvd.allreduce(torch.ones(1))
    else:
        with pytest.raises(hvd.MismatchError, match="different collectives"):
            hvd.allreduce(torch.ones(1), name="another")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    handles = [hvd.allreduce_async(torch.ones(1), op=hvd.Sum) for _ in range(hvd.rank())]
    hvd.barrier()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    assert not any(hvd.poll(handle) for handle in handles)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_that_have_numbered_differently_are_in_step_again(transport):
    run(numbers_differ, 2, transport=transport)
