"""Times allocations of threads in backward passes, with torch's allocator and with torch_ring's.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/allocator_threads.py

On rank 0, in turns with its own optimizer and without one, threads run backward passes at once.
Each allocates and frees 512 KiB in a loop, which is not a size of the model's gradients, or (row
"a gradient's size") is one. The loop is TorchScript's, whose time is included. docs/tuning.md
("Torch's allocator") has results.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
from typing import Any

import torch
from machine import log, machine, title
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import torch_ring as hvd

COUNT = 1 << 17  # elements of float32: 512 KiB
TIMES = 20_000  # allocations of a thread
WITHOUT, SAME = "torch's allocator", "a gradient's size"


@torch.jit.script
def allocate(times: int, count: int) -> int:
    """Allocate and free, without the interpreter's lock."""
    total = 0
    for _ in range(times):
        total += torch.empty([count]).dim()
    return total


class Allocating(torch.autograd.Function):
    """The identity, whose backward pass allocates; takes its time, too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, spans: list[float]) -> Tensor:
        ctx.spans = spans
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        begin = time.perf_counter()
        allocate(TIMES, COUNT)
        ctx.spans.append((time.perf_counter() - begin) / TIMES)
        return gradient, None


def pass_in_threads(threads: int) -> float:
    """Return the time of an allocation, in seconds: the mean of the threads."""
    spans: list[float] = []

    def run() -> None:
        Allocating.apply(torch.ones(1, requires_grad=True), spans).backward()

    each = [threading.Thread(target=run) for _ in range(threads)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    return statistics.mean(spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    hvd.init()
    found: dict[str, list[float]] = {WITHOUT: [], "another size": [], SAME: []}
    pass_in_threads(1)  # TorchScript compiles the loop
    for _ in range(options.rounds):
        for name, spans in found.items():
            model = nn.Linear((COUNT if name == SAME else 2 * COUNT) // 512, 512, bias=False)
            optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
            if name != WITHOUT:
                optimizer = hvd.DistributedOptimizer(optimizer)
            if hvd.rank() == 0:
                spans.append(pass_in_threads(options.threads))
            hvd.barrier()
            del optimizer, model
            gc.collect()  # torch_ring's allocator goes with its last optimizer
    log(title(f"{options.threads} threads, 512 KiB", machine()))
    for name, spans in found.items():
        log(f"{name:20} {1e9 * statistics.median(spans or [0.0]):8.0f} ns")
    hvd.shutdown()


if __name__ == "__main__":
    main()
