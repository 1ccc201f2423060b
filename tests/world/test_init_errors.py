# SPDX-License-Identifier: Apache-2.0
"""init(): its errors, and those of calls before it; worlds of some of the ranks."""

import os

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of
from process_set_use import check_process_set

import torch_ring as hvd


@on_ranks(1, initialized=False)
def test_calls_before_init() -> None:
    """The first arguments of init() are no rank, size or backend."""
    for call in (hvd.rank, hvd.size, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"call init\(\) first"):
            call()
    for arguments in ((0, 2), ("gloo",)):
        with pytest.raises(ValueError, match=r"give rank and size by name, as in init\(rank=0"):
            hvd.init(*arguments)
    assert not hvd.is_initialized()


@on_ranks(4, initialized=False)
def test_lists_of_ranks() -> None:
    """tests/world/test_several_hosts.py has them with a store of rank 0."""
    rank = int(os.environ["RANK"])
    for _ in range(2):
        half = [rank % 2 + 2, rank % 2]
        hvd.init(comm=half)
        assert (hvd.rank(), hvd.size()) == (rank // 2, 2)
        assert (hvd.local_size(), hvd.cross_size()) == (2, 1)
        assert hvd.allgather(torch.tensor([rank])).tolist() == sorted(half)
        check_process_set(hvd.add_process_set([1]), [1])
        hvd.shutdown()
    kind, text = error_of(lambda: hvd.init(comm=[(rank + 1) % 4]))
    assert (kind, f"rank {rank} is not in" in text) == ("InvalidArgumentError", True)
    hvd.init(comm=[rank])
    assert (hvd.rank(), hvd.size()) == (0, 1)
    hvd.shutdown()
    hvd.init(comm=[3, 1, 2, 0])
    assert (hvd.rank(), hvd.size()) == (rank, 4)
    hvd.barrier()
    hvd.shutdown()
