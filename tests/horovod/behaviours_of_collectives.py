"""Behaviours of horovod.torch in init() and process sets.

1 to 8 are in tests/collectives: mismatches and wrong arguments in test_wrong_calls.py, names and
handles in test_handles.py, the rest in test_every_collective.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import torch_ring as hvd


@contextmanager
def raises(kind: type[BaseException], text: str = "") -> Iterator[None]:
    """Check that the block raises an error that contains a text."""
    with pytest.raises(kind, match=re.escape(text)):
        yield


def behaviour_18_again_and_again() -> None:
    for _ in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        with raises(ValueError, "init"):
            hvd.allreduce(torch.ones(1))
        hvd.init()
        hvd.init()  # nothing
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def behaviour_19_process_sets() -> None:
    size, rank = hvd.size(), hvd.rank()
    first = hvd.add_process_set([0])
    rest = hvd.add_process_set(hvd.ProcessSet(list(range(1, size))))
    mine, other = (first, rest) if rank == 0 else (rest, first)
    assert mine.included()
    assert not other.included()
    assert hvd.global_process_set.process_set_id == 0
    assert (first.process_set_id, rest.process_set_id) == (1, 2)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == mine.size()
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    for call in (
        lambda: hvd.allreduce(torch.ones(1), process_set=other),
        lambda: hvd.barrier(process_set=other),
        lambda: hvd.add_process_set([0]),
    ):
        with raises(ValueError):
            call()
    x = torch.zeros(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)], process_set=rest)
    (x * rank).sum().backward()
    optimizer.step()
    assert -x.item() == (0 if rank == 0 else sum(range(1, size)) / (size - 1))
    assert hvd.remove_process_set(rest)
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)
