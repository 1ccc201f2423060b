# SPDX-License-Identifier: Apache-2.0
"""Whole jobs on any accelerator, called as device_operations are.

They train beside torch's DDP and in 16 bits, and they call init() again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from training import (
    assert_same_on_all_ranks,
    assert_same_weights,
    joined_batches,
    loss_of,
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


def train_in_16_bits(device: str) -> None:
    """Autocast and a GradScaler; one rank overflows once. A stand-in has no autocast."""

    def play(wrap: Callable[[Optimizer], Optimizer], ranks: Sequence[int]) -> nn.Module:
        model = make_model().to(device)
        optimizer = wrap(SGD(model.parameters(), lr=0.1, momentum=0.9))
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        for step, batch in enumerate(joined_batches(5)):
            optimizer.zero_grad()
            for rank in ranks:
                with torch.autocast(device, torch.float16, enabled=device == "cuda"):
                    loss = loss_of(model, batch[rank :: hvd.size()].to(device)) / len(ranks)
                overflow = step == 2 and rank == hvd.size() - 1
                scaler.scale(loss * torch.inf if overflow else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        return model.cpu()

    together = play(hvd.DistributedOptimizer, [hvd.rank()])
    assert_same_on_all_ranks(*together.parameters())
    alone = play(lambda optimizer: optimizer, range(hvd.size()))
    for weight, other in zip(together.parameters(), alone.parameters(), strict=True):
        # Rounding to 16 bits now and then goes the other way. One rank's own gradients, not
        # averaged, differ by 0.04.
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-3)


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
    train_in_16_bits,
    init_again,
]
