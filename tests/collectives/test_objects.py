# SPDX-License-Identifier: Apache-2.0
"""broadcast_object() and allgather_object()."""

import threading
from collections import defaultdict

import pytest
import torch
from on_ranks import on_ranks
from pool import expect_error, run

import torch_ring as hvd


@pytest.mark.parametrize("size", [1, 3])
@on_ranks()
def test_objects(size) -> None:
    for root in range(hvd.size()):
        text = "é" * (1000 + hvd.rank() * 1_500_000)  # UTF-8: up to 6 MB
        mine = {"rank": hvd.rank(), "tensor": torch.ones(3), "text": text}
        received = hvd.broadcast_object(mine, root_rank=root, name="a thing")
        assert received["rank"] == root
        assert len(received["text"]) == 1000 + root * 1_500_000
        assert (received is mine) == (hvd.rank() == root)
    for length in (1, 100_000):
        gathered = hvd.allgather_object(list(range(hvd.rank() * length)), name="lists")
        assert gathered == [list(range(rank * length)) for rank in range(hvd.size())]


def share_nameless_objects() -> None:
    """Defaultdicts of lambdas and classes made in functions, which Horovod takes as well."""

    class Local:
        rank = hvd.rank()

    counts = hvd.broadcast_object(defaultdict(lambda: 7, root=hvd.rank()), root_rank=1)
    assert counts["root"] == 1
    assert counts["missing"] == 7
    assert [local.rank for local in hvd.allgather_object(Local)] == [0, 1]


def test_objects_that_only_cloudpickle_takes():
    pytest.importorskip("cloudpickle")
    run(share_nameless_objects, 2)


@on_ranks(3)
def test_objects_without_a_pickle() -> None:
    """If one rank cannot pickle its object, all ranks get an error, and the job goes on."""
    for share in (hvd.broadcast_object, hvd.allgather_object):
        if hvd.rank() == 0:
            expect_error("TypeError", "pickle", lambda s=share: s(threading.Lock()))
        else:
            words = "rank 0 cannot pickle its object"
            expect_error("RuntimeError", words, lambda s=share: s("text"))
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
