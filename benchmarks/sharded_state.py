# SPDX-License-Identifier: Apache-2.0
"""Measures memory and time of sharded optimizer state, beside peers.

    python benchmarks/sharded_state.py --json sharded_state.json

It starts the ranks itself. Memory is measured in a job of its own for each variant: after three
steps, the proportional set sizes of its ranks (Pss in /proc/PID/smaps_rollup), which count a shared
page only once, less those of ranks without a model. Time: all variants in one job, in turns.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import computer, save, title
from peers import start_gloo, stop_gloo
from suite import launched
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from turns import in_turns

import torch_ring as hvd

VARIANTS = ("sharded", "unsharded", "ddp", "zero")
"""shard_state=True and False; DDP over gloo with Adam, and with ZeroRedundancyOptimizer."""

BATCH, LAYERS = 8, 12


@dataclass(frozen=True)
class Row:
    """A variant; times are medians of the rounds, of the slowest rank."""

    variant: str
    parameters: int
    pss_mib: float  # of all ranks together, for the model and its training
    step_ms: float  # of optimizer.step() alone
    whole_ms: float  # of a training step


class Replica:
    """A model and the step that trains it, always on the same batch."""

    def __init__(self, variant: str, parameters: int) -> None:
        width = round((parameters / LAYERS) ** 0.5)
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(
            *(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        )
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        torch.manual_seed(1 + hvd.rank())
        self._batch = torch.randn(BATCH, width)
        if variant in ("ddp", "zero"):
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        weights = list(self.model.parameters())
        self.optimizer: Any = (
            ZeroRedundancyOptimizer(weights, torch.optim.Adam, lr=1e-4)
            if variant == "zero"
            else torch.optim.Adam(weights, lr=1e-4)
        )
        if variant in ("sharded", "unsharded"):
            hvd.DistributedOptimizer(self.optimizer, shard_state=variant == "sharded")
        self.step_s = 0.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        started = time.perf_counter()
        self.optimizer.step()
        self.step_s += time.perf_counter() - started

    def timed(self, steps: int) -> tuple[float, float]:
        """Return the time of ``optimizer.step()``, and of a whole step."""
        self.step()
        hvd.barrier()
        self.step_s, started = 0.0, time.perf_counter()
        for _ in range(steps):
            self.step()
        return self.step_s / steps, (time.perf_counter() - started) / steps


def pss() -> float:
    """Return the proportional set sizes of all ranks together, in MiB. Collective."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    hvd.barrier()
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert found is not None
    own = torch.tensor(int(found[1]) / 1024, dtype=torch.float64)
    return float(hvd.allreduce(own, op=hvd.Sum))


def measure_memory(variant: str, args: argparse.Namespace) -> float:
    before = pss()
    replica = Replica(variant, args.parameters)
    for _ in range(3):
        replica.step()
    return pss() - before


def measure_time(args: argparse.Namespace) -> tuple[int, dict[str, tuple[float, float]]]:
    replicas = {variant: Replica(variant, args.parameters) for variant in args.variants}
    steps: dict[str, list[float]] = {variant: [] for variant in args.variants}

    def run(variant: str) -> float:
        step_s, whole_s = replicas[variant].timed(args.steps)
        steps[variant].append(step_s)
        return whole_s

    timed: dict[str, Callable[[], float]] = {v: functools.partial(run, v) for v in replicas}
    whole = in_turns(timed, args.rounds)
    alone = torch.tensor(list(steps.values()), dtype=torch.float64)[:, 1:]  # without the warm-up
    slowest = dict(zip(steps, hvd.allreduce(alone, op=hvd.Max).tolist(), strict=True))
    medians = {v: (statistics.median(slowest[v]), statistics.median(whole[v])) for v in steps}
    return next(iter(replicas.values())).parameters, medians


def be_rank(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # a rank has a core
    hvd.init()
    start_gloo()
    dist.barrier()  # connects the ranks
    found: Any = measure_memory(args.memory, args) if args.memory else measure_time(args)
    if hvd.rank() == 0:
        args.result.write_text(json.dumps(found))
    dist.barrier()
    stop_gloo()
    hvd.shutdown()
    return 0


def ranks(args: argparse.Namespace, *more: str) -> Any:
    """Start a job of this program; return the result of its rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        sizes = ["--parameters", str(args.parameters), "--rounds", str(args.rounds)]
        sizes += ["--steps", str(args.steps), "--variants", *args.variants]
        command = [*launched(args.ranks), __file__, *sizes, "--result", str(result), *more]
        subprocess.run(command, check=True)
        return json.loads(result.read_text())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=50_000_000, help="about so many")
    parser.add_argument("--rounds", type=int, default=7, help="each variant is timed once a round")
    parser.add_argument("--steps", type=int, default=3, help="steps of a variant in a round")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="only these"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--memory", choices=VARIANTS, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.result is not None:
        return be_rank(args)
    facts = computer() | {"ranks": args.ranks, "hosts": 1}
    memory = {variant: ranks(args, "--memory", variant) for variant in args.variants}
    parameters, times = ranks(args)
    rows = [
        Row(variant, parameters, memory[variant], *(second * 1e3 for second in times[variant]))
        for variant in args.variants
    ]
    print(title(f"Adam, {parameters / 1e6:.1f} M parameters", facts))
    print(f"#{'variant':>12}{'memory':>10}{'step()':>10}{'whole step':>12}")
    print(f"#{'':12}{'(MiB)':>10}{'(ms)':>10}{'(ms)':>12}")
    for row in rows:
        print(f"{row.variant:>13}{row.pss_mib:>10.0f}{row.step_ms:>10.1f}{row.whole_ms:>12.1f}")
    save(args.json, "python", facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
