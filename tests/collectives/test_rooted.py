"""The engine's reduce, gather and scatter, and its barrier that keeps the numbering."""

from __future__ import annotations

import pytest
import torch
from pool import error_of, run
from rooted_checks import check_gather, check_reduce, check_scatter
from worlds import on_both_transports, on_most_worlds

import torch_ring as hvd
from torch_ring.world.current import engine


@on_most_worlds
@pytest.mark.parametrize(
    "check", [check_reduce, check_gather, check_scatter], ids=lambda check: check.__name__
)
def test_rooted(check, transport, size):
    run(check, size, transport=transport)


def check_refusals() -> None:
    size = hvd.size()
    t = torch.ones(3)
    for call, message in [
        (lambda: engine().submit("reduce", t, root=size), f"root rank {size} is not one of"),
        (lambda: engine().submit("gather", t), "gather: root rank -1 is not one of"),
        (
            lambda: engine().submit("scatter", None, t, "n", root=9),
            "scatter 'n': root rank 9 is not one of",
        ),
        (
            lambda: engine().submit("reduce", t, t, "", False, hvd.Adasum, root=0),
            "an op of allreduce",
        ),
        (
            lambda: engine().submit("reduce", t, t, "", False, hvd.Band, root=0),
            "no Band of float32",
        ),
        (lambda: engine().submit("reduce", t, t, "", False, 9, root=0), "unknown op 9"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    if hvd.rank() == 0:
        for call, message in [
            (
                lambda: engine().submit("scatter", None, t, root=0),
                "the root must give the tensor of all parts",
            ),
            (lambda: engine().submit("scatter", t, t, root=0), "of all parts must have the shape"),
            (lambda: engine().submit("gather", t, t, root=0), "of all parts must have the shape"),
            (
                lambda: engine().submit("reduce", t, torch.ones(4), root=0),
                "the output differs from the input",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                call()
    kind, text = error_of(lambda: engine().submit("gather", t, None, "g", root=hvd.rank()).wait())
    assert kind == "MismatchError"
    assert "rank 0: gather 'g' float32 [3] root 0; rank 1: gather 'g' float32 [3] root 1" in text
    shape = (3,) if hvd.rank() == 0 else (4,)
    kind, text = error_of(lambda: engine().submit("reduce", torch.ones(shape), root=0).wait())
    assert kind == "MismatchError"
    assert "float32 [3] Sum root 0" in text
    assert "float32 [4] Sum root 0" in text
    dtype = torch.int32 if hvd.rank() == 0 else torch.float32
    kind, text = error_of(
        lambda: engine().submit("gather", torch.ones(3, dtype=dtype), root=1).wait()
    )
    assert kind == "MismatchError"
    assert "int32 [3] root 1" in text
    assert "float32 [3] root 1" in text
    assert hvd.allreduce(t, op=hvd.Sum).tolist() == [size] * 3


@on_both_transports
def test_rooted_refusals_and_mismatches(transport):
    run(check_refusals, 2, transport=transport)


def check_fence() -> None:
    """Requests on both sides of a fence stay in flight; a barrier's renumbering forbids that."""
    rank, size = hvd.rank(), hvd.size()
    works = []
    for step in range(20):
        works.append(hvd.allreduce_async(torch.tensor([float(rank + step)]), op=hvd.Sum))
        works.append(engine().submit("fence"))
    for step in range(20):
        total = size * (size - 1) / 2 + size * step
        assert hvd.synchronize(works[2 * step]).item() == total
        assert works[2 * step + 1].wait() is None
    kind, text = error_of(
        lambda: (
            engine().submit("fence", None, None, None, True).wait() if rank == 0 else hvd.barrier()
        )
    )
    if size > 1:
        assert kind == "MismatchError"
        assert "fence" in text
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@on_most_worlds
def test_a_fence_keeps_the_numbering(transport, size):
    run(check_fence, size, transport=transport)
