"""The values of snapshot() beside the operations: rounds, connections and memory."""

from __future__ import annotations

import torch
from pool import run
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.tracing import snapshot


def look_at_the_snapshot() -> None:
    before = snapshot()
    for _ in range(5):
        hvd.allreduce(torch.ones(10), name="a")
    after = snapshot()
    assert after.sets[0].rounds >= before.sets[0].rounds + 5
    assert after.connections == before.connections  # the existing ones were reused
    shared = hvd.empty_shared(1 << 20)
    during = snapshot().memory.shared_bytes
    del shared
    if before.connections == 0:  # shared memory
        assert during >= after.memory.shared_bytes + (4 << 20)
        assert snapshot().memory.shared_bytes == after.memory.shared_bytes
    else:
        assert during == after.memory.shared_bytes == 0
    result = hvd.allreduce(torch.ones(2 << 20), name="large")  # 8 MiB: of the pool
    in_use = snapshot().memory.kept_result_bytes
    del result
    assert snapshot().memory.kept_result_bytes >= in_use + (8 << 20)


@on_both_transports
def test_the_snapshot_has_rounds_connections_and_memory(transport: str) -> None:
    run(look_at_the_snapshot, 2, transport=transport)


def train_with_direct_gradients() -> int:
    model = torch.nn.Linear(300, 200)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return snapshot().memory.kept_gradient_bytes


def test_the_snapshot_has_the_memory_that_is_kept_for_gradients() -> None:
    for kept in run(train_with_direct_gradients, 2):
        assert kept >= 300 * 200 * 4
