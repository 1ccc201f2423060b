# SPDX-License-Identifier: Apache-2.0
"""Measures exposed communication: the part that a training step does not hide.

    torchrun --nproc-per-node 2 benchmarks/training_step.py --json training_step.json
    torchrun --nproc-per-node 2 benchmarks/training_step.py --models parameters pinn   # host cost
    torchrun --nproc-per-node 2 benchmarks/training_step.py --variants torch_ring nan_check

It times, in turns, steps of several variants, one that only waits for the other ranks, and one
without communication. benchmarks/README.md explains the variants and the columns.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import log, machine, title, write_report
from peers import group_of, start_gloo, stop_gloo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from turns import in_turns, seconds
from workloads import WORKLOADS, Batch, Workload

import torch_ring as hvd

MODELS = ("mnist", "resnet18", "resnet50", "vgg16", "pinn")
VARIANTS = ("torch_ring", "ddp", "ddp_ring", "nan_check")
"""DistributedOptimizer; DDP over gloo, over ring; DistributedOptimizer with nan_check.

Two more are always there: "torch" has no communication; "barrier" sends no gradients, but waits for
all ranks after each backward pass.
"""
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
    gradients_differ: float  # among the variants in step 1, relative to the largest


class Replica:
    """A model and the step that trains it, always on the same batch."""

    def __init__(self, workload: Workload, variant: str, model: nn.Module, batch: Batch) -> None:
        self._batch = batch
        self._loss = workload.loss
        self._model = model
        if variant.startswith("ddp"):
            group = group_of("ring" if variant == "ddp_ring" else "gloo")
            self._model = DistributedDataParallel(model, process_group=group)
        self._optimizer = workload.make_optimizer(model.parameters())
        self._waits = variant == "barrier"
        if variant in ("torch_ring", "nan_check"):
            named, looks = model.named_parameters(), variant == "nan_check"
            hvd.DistributedOptimizer(self._optimizer, named, nan_check=looks)
        self.parameters: list[Tensor] = list(model.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._loss(self._model, self._batch).backward()
        if self._waits:
            hvd.barrier()
        self._optimizer.step()


def replicas_of(
    workload: Workload, samples: int | None, variants: Iterable[str]
) -> dict[str, Replica]:
    """Return a replica of each variant: the same weights on all ranks, a batch for each rank.

    Args:
        samples: in a batch; None: the workload's own number.
    """
    torch.manual_seed(0)
    model = workload.make_model()
    torch.manual_seed(1 + hvd.rank())
    batch = workload.make_batch(samples or workload.batch)
    return {variant: Replica(workload, variant, deepcopy(model), batch) for variant in variants}


def difference(one: Replica, other: Replica) -> float:
    """Return the largest difference of two replicas' gradients, relative to the largest gradient.

    Gradients are compared and not weights: Adam's first steps hardly depend on a gradient's size.
    """
    pairs = [(p.grad, q.grad) for p, q in zip(one.parameters, other.parameters, strict=True)]
    largest = max(float(gradient.abs().max()) for gradient, _ in pairs)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs) / largest


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", choices=WORKLOADS, nargs="+", default=list(MODELS))
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS[:3]))
    parser.add_argument("--batch", type=int, help="of a rank; else each model's own")
    parser.add_argument("--rounds", type=int, default=15, help="each variant is timed once a round")
    parser.add_argument("--round-s", type=float, default=2.0, help="a variant's part of a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def measure(args: argparse.Namespace, name: str) -> list[Row]:
    workload = WORKLOADS[name]
    replicas = replicas_of(workload, args.batch, ("torch", *args.variants, "barrier"))
    compared = [replicas[variant] for variant in args.variants]
    for replica in compared:
        torch.manual_seed(hvd.rank())  # the same dropout
        replica.step()
    differ = max(difference(replica, compared[-1]) for replica in compared)
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
            sum(p.numel() * p.element_size() for p in compared[0].parameters),
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
        f"#{'model':>10}{'gradients':>11}{'batch':>7}{'variant':>13}{'step':>11}"
        f"{'exposed':>11}{'exposed':>9}{'beyond':>11}{'efficiency':>12}{'of one':>8}",
        f"#{'':10}{'(MB)':>11}{'':20}{'(ms)':>11}{'(ms)':>11}{'(%)':>9}{'(ms)':>11}{'(%)':>12}"
        f"{'(%)':>8}",
    ]


def line(row: Row) -> str:
    text = (
        f"{row.model:>11}{row.gradient_bytes / 1e6:>11.3f}{row.batch:>7}{row.variant:>13}"
        f"{row.step_ms:>11.3f}"
    )
    if row.variant not in ("torch", "one process"):
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
        log(f"the variants have different gradients: {', '.join(wrong)}")
    hvd.shutdown()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
