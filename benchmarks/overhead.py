"""Measures torch_ring's cost besides communication: in a step, and after init() alone.

    torchrun --nproc-per-node 2 benchmarks/overhead.py --json benchmarks/results/overhead.json

The models have nothing to compute, so the time of a step is that of handling gradients.
benchmarks/README.md explains the columns.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from machine import log, machine, title, write_report
from peers import empty_shared, start_gloo, stop_gloo
from replicas import VARIANTS, difference, replicas_of
from turns import in_turns, seconds
from workloads import WORKLOADS

import torch_ring as hvd

MODELS = ("500 parameters", "pinn")
TOLERANCE = 1e-4  # of gradients: torch_ring and DDP may add in different orders


@dataclass(frozen=True)
class Row:
    """A step of one variant; medians, in microseconds; `added` is relative to the plain step."""

    model: str
    parameters: int
    variant: str
    step_us: float
    added_us: float
    collective_us: float  # one blocking allreduce of as many bytes, same library
    host_us: float  # the added time without the collective
    host_us_a_parameter: float


@dataclass(frozen=True)
class Idle:
    """Throughput of a computation on all cores with an idle torch_ring, relative to without.

    The control is the second run without torch_ring, relative to the first: it shows the machine's
    own variation.
    """

    relative: float  # medians of the rounds
    control: float
    relative_quartiles: tuple[float, float]
    control_quartiles: tuple[float, float]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="in a round")
    parser.add_argument("--rounds", type=int, default=21, help="each variant is timed once a round")
    parser.add_argument(
        "--compute-s", type=float, default=0.5, help="of computing in a round, beside init() alone"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


# --- of a step


def measure_steps(args: argparse.Namespace, name: str) -> list[Row]:
    replicas = replicas_of(WORKLOADS[name])
    count = len(replicas["torch"].parameters)
    numel = replicas["torch"].gradient_bytes // 4
    shared, private = empty_shared(numel, torch.float32).zero_(), torch.zeros(numel)
    runs: dict[str, Callable[[], object]] = {v: replica.step for v, replica in replicas.items()}
    runs["torch_ring alone"] = lambda: hvd.allreduce_(shared, op=hvd.Sum)
    runs["ddp alone"] = lambda: dist.all_reduce(private)

    timed = {run: functools.partial(seconds, runs[run], args.steps) for run in runs}
    times = in_turns(timed, args.rounds)
    apart = difference(replicas["torch_ring"], replicas["ddp"])
    if apart > TOLERANCE:
        raise RuntimeError(f"{name}: torch_ring and DDP have different gradients: {apart}")

    zero = [0.0] * args.rounds
    rows = []
    for variant in VARIANTS:
        alone = times.get(f"{variant} alone", zero)
        rounds = zip(times[variant], times["torch"], alone, strict=True)
        added = [(step - plain, of_collective) for step, plain, of_collective in rounds]
        host_us = statistics.median(a - c for a, c in added) * 1e6 if variant != "torch" else 0.0
        row = Row(
            name,
            count,
            variant,
            step_us=statistics.median(times[variant]) * 1e6,
            added_us=statistics.median(a for a, _ in added) * 1e6,
            collective_us=statistics.median(alone) * 1e6,
            host_us=host_us,
            host_us_a_parameter=host_us / count,
        )
        rows.append(row)
    return rows


def table(rows: list[Row]) -> list[str]:
    lines = [
        f"#{'model':>15}{'parameters':>11}{'variant':>12}{'step':>10}{'added':>10}{'collective':>11}"
        f"{'host':>10}{'host each':>10}",
        f"#{'':38}{'(us)':>10}{'(us)':>10}{'(us)':>11}{'(us)':>10}{'(us)':>10}",
    ]
    return lines + [
        f"{row.model:>16}{row.parameters:>11}{row.variant:>12}{row.step_us:>10.1f}"
        f"{row.added_us:>10.1f}{row.collective_us:>11.1f}{row.host_us:>10.1f}"
        f"{row.host_us_a_parameter:>10.3f}"
        for row in rows
    ]


# --- of init() alone


def throughput(duration_s: float) -> float:
    """Return the number of small matrix products a second that this rank computes."""
    matrix = torch.randn(128, 128)
    products, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < duration_s:
        torch.mm(matrix, matrix)
        products += 1
    return products / elapsed


def total_throughput(duration_s: float) -> float:
    """Return the sum over all ranks, which compute at once. Over gloo, without torch_ring."""
    dist.barrier()
    mine = torch.tensor(throughput(duration_s), dtype=torch.float64)
    dist.all_reduce(mine)
    return float(mine)


def measure_idle(args: argparse.Namespace) -> Idle:
    """Compute without torch_ring, with it, without it, and so on. Shuts it down afterwards."""
    relative, control = [], []
    os.environ["TORCH_RING_LOG_LEVEL"] = "warning"  # no line for each init()
    for turn in range(1 + args.rounds):
        hvd.shutdown()
        before = total_throughput(args.compute_s)
        hvd.init()
        during = total_throughput(args.compute_s)
        hvd.shutdown()
        after = total_throughput(args.compute_s)
        if turn > 0:  # the first one warms up
            relative.append(2 * during / (before + after))
            control.append(after / before)
    return Idle(
        statistics.median(relative),
        statistics.median(control),
        quartiles(relative),
        quartiles(control),
    )


def quartiles(values: list[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    hvd.init()
    start_gloo()
    facts = machine()
    log(title("host cost of a step", facts))
    rows = [row for model in MODELS for row in measure_steps(args, model)]
    log(*table(rows))
    idle = measure_idle(args)
    hvd.init()
    log(
        "# throughput of a computation on all ranks after init(), relative to without",
        f"relative {idle.relative:.4f}, quartiles {idle.relative_quartiles[0]:.4f} to "
        f"{idle.relative_quartiles[1]:.4f}; control (without relative to without) "
        f"{idle.control:.4f}, {idle.control_quartiles[0]:.4f} to {idle.control_quartiles[1]:.4f}",
    )
    write_report(args.json, facts, rows, init=idle)
    stop_gloo()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
