"""Measures exposed communication: the part that a training step does not hide.

    torchrun --nproc-per-node 2 benchmarks/training_step.py --json training_step.json

It times, in turns, a step with torch_ring, one with DistributedDataParallel over gloo and one over
the backend ring, one that only waits for the other ranks, and one without communication.
benchmarks/README.md explains the columns.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import log, machine, title, write_report
from peers import start_gloo, stop_gloo
from replicas import VARIANTS, difference, replicas_of
from turns import in_turns, seconds
from workloads import WORKLOADS

import torch_ring as hvd

MODELS = ("mnist", "resnet18", "resnet50", "vgg16", "pinn")
MOST_STEPS = 200  # in a round
TOLERANCE = 1e-4  # of gradients: torch_ring and DDP may add in different orders


@dataclass(frozen=True)
class Row:
    """A step of one variant; medians of the rounds."""

    model: str
    gradient_bytes: int
    batch: int  # of a rank
    variant: str  # "torch": no communication; "one process": the other ranks idle
    step_ms: float
    exposed_ms: float  # the time beyond that of the same ranks without communication
    beyond_ms: float  # the time beyond that of ranks that only wait for one another
    efficiency: float  # step without communication on all ranks / this step
    efficiency_of_one: float  # step of one process alone / this step
    gradients_differ: float  # from those of DDP over gloo in step 1, relative to the largest


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", choices=WORKLOADS, nargs="+", default=list(MODELS))
    parser.add_argument("--batch", type=int, help="of a rank; else each model's own")
    parser.add_argument("--rounds", type=int, default=15, help="each variant is timed once a round")
    parser.add_argument("--round-s", type=float, default=2.0, help="a variant's part of a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def measure(args: argparse.Namespace, name: str) -> list[Row]:
    workload = WORKLOADS[name]
    replicas = replicas_of(workload, args.batch, (*VARIANTS, "ddp_ring", "barrier"))
    for variant in ("torch_ring", "ddp", "ddp_ring"):
        torch.manual_seed(hvd.rank())  # the same dropout
        replicas[variant].step()
    differ = max(difference(replicas[v], replicas["ddp"]) for v in ("torch_ring", "ddp_ring"))
    apart = float(hvd.allreduce(torch.tensor(differ, dtype=torch.float64), op=hvd.Max))
    # The second step is like all later ones: torch_ring and DDP have planned their buckets anew.
    estimate = in_turns({v: lambda r=r: seconds(r.step, 1) for v, r in replicas.items()}, 1)
    longest_s = max(itertools.chain(*estimate.values()))
    steps = max(1, min(MOST_STEPS, round(args.round_s / longest_s)))

    timed: dict[str, Callable[[], float]] = {
        variant: lambda replica=replica: seconds(replica.step, steps)
        for variant, replica in replicas.items()
    }
    timed["one process"] = lambda: seconds(replicas["torch"].step, steps if hvd.rank() == 0 else 0)
    times = in_turns(timed, args.rounds)
    one_s = statistics.median(times["one process"])

    def row(variant: str) -> Row:
        step_s = statistics.median(times[variant])
        pairs = list(zip(times[variant], times["torch"], strict=True))
        waiting = zip(times[variant], times["barrier"], strict=True)
        return Row(
            name,
            replicas["torch"].gradient_bytes,
            args.batch or workload.batch,
            variant,
            step_ms=step_s * 1e3,
            exposed_ms=statistics.median(step - plain for step, plain in pairs) * 1e3,
            beyond_ms=statistics.median(step - wait for step, wait in waiting) * 1e3,
            efficiency=statistics.median(plain / step for step, plain in pairs),
            efficiency_of_one=one_s / step_s,
            gradients_differ=apart,
        )

    return [row(variant) for variant in times]


def header() -> list[str]:
    return [
        f"#{'model':>9}{'gradients':>11}{'batch':>7}{'variant':>13}{'step':>11}"
        f"{'exposed':>11}{'exposed':>9}{'beyond':>11}{'efficiency':>12}{'of one':>8}",
        f"#{'':9}{'(MB)':>11}{'':20}{'(ms)':>11}{'(ms)':>11}{'(%)':>9}{'(ms)':>11}{'(%)':>12}"
        f"{'(%)':>8}",
    ]


def line(row: Row) -> str:
    text = (
        f"{row.model:>10}{row.gradient_bytes / 1e6:>11.3f}{row.batch:>7}{row.variant:>13}"
        f"{row.step_ms:>11.3f}"
    )
    if row.variant in ("barrier", "torch_ring", "ddp", "ddp_ring"):
        share = row.exposed_ms / row.step_ms
        beyond = f"{row.beyond_ms:.3f}" if row.variant != "barrier" else ""
        text += f"{row.exposed_ms:>11.3f}{share * 100:>9.2f}{beyond:>11}"
        text += f"{row.efficiency * 100:>12.1f}{row.efficiency_of_one * 100:>8.1f}"
    return text


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)  # a rank has a core
    hvd.init()
    start_gloo()
    facts, rows = machine(), []
    log(title("a training step", facts), *header())
    for name in args.models:
        of_model = measure(args, name)
        log(*map(line, of_model))
        rows += of_model
        gc.collect()  # frees this model before the next one is made
    write_report(args.json, facts, rows)
    stop_gloo()
    wrong = sorted({row.model for row in rows if row.gradients_differ > TOLERANCE})
    if wrong:
        log(f"gradients differ from those of DDP over gloo: {', '.join(wrong)}")
    hvd.shutdown()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
