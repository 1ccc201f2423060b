# SPDX-License-Identifier: Apache-2.0
"""Trains from its last checkpoint; rank 1 dies in a step, in the first life of the job.

torchrun --nproc-per-node 2 --max-restarts 1 tests/elastic/restarted_program.py CHECKPOINT
"""

from __future__ import annotations

import os
import signal
import sys

import torch

import torch_ring as hvd
from torch_ring import checkpoint

STEPS, EVERY, DEATH = 8, 3, 5  # a checkpoint after steps 2 and 5


def main() -> None:
    path, life = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    hvd.init()
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    start = 0
    saved = checkpoint.load(path, default=None)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    for step in range(start, STEPS):
        optimizer.zero_grad()
        loss = model(torch.full((1, 1), float(step + hvd.rank())))
        if (life, hvd.rank(), step) == (0, 1, DEATH):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.sum().backward()
        optimizer.step()
        print(f"life {life} rank {hvd.rank()} step {step}: {model.weight.item()}", flush=True)
        if (step + 1) % EVERY == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save(path, states | {"step": step + 1})


if __name__ == "__main__":
    main()
