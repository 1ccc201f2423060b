# SPDX-License-Identifier: Apache-2.0
"""The engine's barrier that keeps the numbering."""

from __future__ import annotations

import torch
from pool import error_of, run
from worlds import on_most_worlds

import torch_ring as hvd
from torch_ring.world.current import engine


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
