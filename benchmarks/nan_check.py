"""Measures the cost of nan_check in a training step: one look at each gradient.

    torchrun --nproc-per-node 2 benchmarks/nan_check.py

It times, in turns, a step with it and one without, on the same ranks.
"""

from __future__ import annotations

import functools
import statistics
import sys

import torch
from machine import log, machine, title
from replicas import replicas_of
from turns import in_turns, seconds
from workloads import WORKLOADS

import torch_ring as hvd

MODELS = ("500 parameters", "pinn", "mnist", "resnet18", "vgg16")
ROUNDS, ROUND_S = 15, 1.0


def measure(name: str) -> str:
    replicas = replicas_of(WORKLOADS[name], variants=("torch_ring", "nan_check"))
    first = seconds(replicas["torch_ring"].step, 1, untimed=3)
    slowest = hvd.allreduce(torch.tensor(first), op=hvd.Max).item()
    steps = max(2, min(200, round(ROUND_S / slowest)))
    times = in_turns(
        {
            variant: functools.partial(seconds, replica.step, steps, 1)
            for variant, replica in replicas.items()
        },
        ROUNDS,
    )
    without = statistics.median(times["torch_ring"])
    added = statistics.median(
        b - a for a, b in zip(times["torch_ring"], times["nan_check"], strict=True)
    )
    mb, step_ms, added_ms = replicas["torch_ring"].gradient_bytes / 1e6, without * 1e3, added * 1e3
    return f"{name:>16}{mb:>12.2f}{step_ms:>12.3f}{added_ms:>12.3f}{added / without:>10.2%}"


def main() -> int:
    torch.set_num_threads(1)
    hvd.init()
    if hvd.rank() == 0:
        log(title("a step with nan_check", machine()))
        log(
            f"#{'model':>15}{'gradients':>12}{'step':>12}{'added':>12}{'share':>10}",
            f"#{'':15}{'(MB)':>12}{'(ms)':>12}{'(ms)':>12}",
        )
    for name in MODELS:
        try:
            line = measure(name)
        except ImportError as error:  # torchvision
            line = f"# {name}: {error}"
        if hvd.rank() == 0:
            log(line)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
