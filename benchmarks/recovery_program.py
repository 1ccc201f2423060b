"""Trains a small network on elastic ranks, and writes when each step has ended; for recovery.py.

    python -m torch_ring.run -np 4 --min-np 1 python benchmarks/recovery_program.py --folder F
    torchrun --nproc-per-node 4 --max-restarts 1 benchmarks/recovery_program.py --folder F

The training is the same under both. If the launcher ends all ranks and starts them again, they
continue from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torch_ring as hvd

WIDTH = 512
CLASSES = 10
BATCH = 32  # samples of a rank


class Training:
    """A network of three layers, its optimizer and one batch, always the same."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(784, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        self.model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(WIDTH, CLASSES))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters())
        self.images, self.labels = torch.randn(BATCH, 784), torch.arange(BATCH) % CLASSES

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()

    def run(self, ended: Callable[[int], bool], start: int = 0) -> None:
        """Train, even if ranks die, until all ranks agree to end.

        Args:
            ended: called after each step with its number; returns whether this rank wants to end.
            start: the number of the first step.
        """

        @hvd.elastic.run
        def train(state: Any) -> None:
            is_over = torch.zeros(1)
            while not is_over.item():
                self.step()
                state.step += 1
                wants_end = torch.tensor([float(ended(state.step))])
                is_over = hvd.allreduce(wants_end, op=hvd.Max, name="is_over")
                state.check_host_updates()

        train(hvd.elastic.TorchState(self.model, self.optimizer, step=start))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for steps and checkpoints")
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    hvd.init()
    training = Training()
    checkpoint = args.folder / "checkpoint.pt"
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    with open(args.folder / f"steps-{os.getpid()}", "w", buffering=1) as steps:

        def ended(step: int) -> bool:
            print(time.monotonic(), hvd.size(), step, hvd.rank(), file=steps)
            if hvd.rank() == 0 and step % args.every == 0:
                states = {"model": training.model, "optimizer": training.optimizer}
                saved = {name: of.state_dict() for name, of in states.items()} | {"step": step}
                torch.save(saved, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)
            return (args.folder / "stop").exists()

        training.run(ended, start)


if __name__ == "__main__":
    main()
