# SPDX-License-Identifier: Apache-2.0
"""join(): ranks that run out of data before others do."""

from __future__ import annotations

import time

import pytest
import torch
from on_ranks import on_ranks
from worlds import on_most_worlds

import torch_ring as hvd


@on_most_worlds
@on_ranks()
def test_ranks_join_in_turn(transport, size) -> None:
    rank = hvd.rank()
    for _ in range(2):  # again, with a different numbering behind it
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


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("tcp", 3)])
@on_ranks()
def test_collectives_that_need_a_joined_rank_fail_on_the_caller(transport, size) -> None:
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1))  # the others' numbering is one operation behind
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


@on_ranks(2, kind="one thread")
def test_a_mismatch_resets_the_numbering_of_collectives() -> None:
    begin = time.monotonic()
    with pytest.raises(hvd.MismatchError, match="different collectives"):
        hvd.allreduce(torch.ones(1), name=[None, "another"][hvd.rank()])
    assert time.monotonic() - begin < 5  # the promise is a second; the machine may be busy
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    handles = [hvd.allreduce_async(torch.ones(1), op=hvd.Sum) for _ in range(hvd.rank())]
    hvd.barrier()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    assert not any(hvd.poll(handle) for handle in handles)
