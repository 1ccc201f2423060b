"""Results of the engine's reduce, gather and scatter in any world."""

from __future__ import annotations

import torch

import torch_ring as hvd
from torch_ring.world.current import engine


def check_every_root() -> None:
    """All three to and from every root, short and long."""
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        for count in (3, 90_001):
            mine = torch.arange(count, dtype=torch.float32) * size + rank
            every = [torch.arange(count, dtype=torch.float32) * size + r for r in range(size)]
            total = engine().submit("reduce", mine, root=root).wait()
            together = engine().submit("gather", mine, root=root).wait()
            back = torch.empty(count)
            engine().submit("scatter", together, back, root=root).wait()
            assert torch.equal(back, mine)
            if rank == root:
                assert torch.equal(total, sum(every))
                assert torch.equal(together, torch.stack(every))
