# SPDX-License-Identifier: Apache-2.0
"""Whole jobs on any accelerator, called as device_operations are.

They train beside torch's DDP, and they call init() again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from training import (
    assert_same_weights,
    joined_batches,
    make_model,
    part,
    train,
)

import torch_ring as hvd


def compare_with_ddp(device: str) -> None:
    """Train beside DDP with NCCL, or beside DDP on the host if the device is a stand-in."""
    backend, there = ("nccl", device) if device == "cuda" else ("gloo", "cpu")
    store, port = None, 0
    if hvd.rank() == 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        port = store.port
    port = hvd.broadcast_object(port)
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group(backend, store=store, rank=hvd.rank(), world_size=hvd.size())
    ours, theirs = make_model().to(device), DistributedDataParallel(make_model().to(there))
    batches = [part(batch) for batch in joined_batches(5)]
    for model, where in ((ours, device), (theirs, there)):
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        if model is ours:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        train(model, optimizer, [batch.to(where) for batch in batches])
    assert_same_weights(ours.cpu(), theirs.module.cpu())
    dist.destroy_process_group()
    hvd.barrier()  # rank 0 is the store


def init_again(device: str) -> None:
    """A tensor outlives the world that used it; the next world uses it too."""
    mine = torch.ones(5, device=device)
    for _ in range(3):
        mine = hvd.allreduce(mine, op=hvd.Sum)
        hvd.shutdown()
        hvd.init()
    assert mine.tolist() == [hvd.size() ** 3] * 5


JOBS: list[Callable[[str], None]] = [
    compare_with_ddp,
    init_again,
]
