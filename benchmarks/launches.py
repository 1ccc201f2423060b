"""Counts what a training step asks of a GPU, beside DDP, and times its host, on a stand-in.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/launches.py --json launches.json

A step is zero_grad() and backward() of a model of 500 parameters, whose gradients take one kernel
each. `make doubles` builds the stand-in. benchmarks/README.md explains the columns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from ddp_on_stand_in import CountingGroup, start_counting_group
from machine import log, machine, title, write_report
from stand_in import DEVICE, Counts, load_stand_ins, make_parameters, zero_loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from turns import in_turns, medians

import torch_ring as hvd
from torch_ring._C import Engine
from torch_ring.optimizer.gradient_report import BackwardReport
from torch_ring.optimizer.planned_reports import Entered, PlannedReports

WARM_UP_STEPS = 6  # DDP and torch_ring plan buckets again; then hosts begin to run ahead
AGREED, AHEAD = "agreed", "run ahead"  # torch_ring with run_ahead=False, and with True
stamps: list[float] = []  # processor time of autograd's thread, when each backward pass began


@dataclass(frozen=True)
class Row:
    """What one variant adds to a step of plain torch, on rank 0: means of the steps."""

    variant: str
    kernels: float
    copies: float
    collectives: float
    recorded: float
    awaited: float
    host_waits: float  # for the device
    rank_waits: float  # for another rank's host


@dataclass(frozen=True)
class HostRow:
    """The host's time of a step: medians of the rounds, of the slowest rank."""

    variant: str
    step_us: float  # until it returns
    ratio: float  # to plain torch
    cpu_us: float  # processor time of the thread in which autograd runs the hooks
    cpu_ratio: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=500)
    parser.add_argument("--steps", type=int, default=20, help="that are counted, and in a round")
    parser.add_argument("--rounds", type=int, default=9, help="each variant is timed once a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


class Parameters(nn.Module):
    """A model whose forward pass computes nothing, for DDP."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(make_parameters(DEVICE, count))

    def forward(self) -> Tensor:
        return zero_loss(list(self.weights))


Step = Callable[[], None]


def steps_of(parameters: int) -> dict[str, Step]:
    """Return a step of each variant, with parameters of its own."""

    def step_of(variant: str) -> Step:
        module: nn.Module = Parameters(parameters)
        optimizer = SGD(module.parameters(), lr=0.1)
        if variant in (AGREED, AHEAD):
            optimizer = hvd.DistributedOptimizer(
                optimizer, module.named_parameters(), run_ahead=variant == AHEAD
            )
        if variant.startswith("ddp"):
            module = DistributedDataParallel(
                module, init_sync=False, gradient_as_bucket_view=variant == "ddp, views"
            )

        def step() -> None:
            optimizer.zero_grad()
            loss = module()
            loss.register_hook(lambda _: stamps.append(time.thread_time()))
            loss.backward()

        return step

    return {name: step_of(name) for name in ("torch", "ddp", "ddp, views", AGREED, AHEAD)}


# --- counts


class RankWaits:
    """Counts for how many backward passes this process's host waits for the other ranks' hosts.

    At the end of an agreed pass, for their reports; in others if one of theirs is late.
    """

    count = 0

    @classmethod
    def watch(cls) -> None:
        """Count from now on."""
        gather, read = Engine.gather_reports, PlannedReports.of

        def gather_reports(engine: Engine, *arguments: Any) -> bytes:
            cls.count += 1
            return gather(engine, *arguments)

        def reports_of(reports: PlannedReports, entered: Entered) -> list[BackwardReport]:
            cls.count += not entered.work.done()
            return read(reports, entered)

        Engine.gather_reports, PlannedReports.of = gather_reports, reports_of


def warm_up(step: Step) -> None:
    """Take steps until they are all alike. Collective."""
    hvd.join()  # hosts forget the other variants' passes
    for _ in range(WARM_UP_STEPS):
        step()


def counted(step: Step, steps: int) -> tuple[Counts, int]:
    """Return what so many steps ask of the device, and the passes that wait for other hosts."""
    hvd.barrier()  # what came before has been enqueued
    before, collectives, waits = Counts.now(), CountingGroup.collectives, RankWaits.count
    for _ in range(steps):
        step()
        hvd.barrier()  # else a host is so far ahead that it waits
    asked = Counts.now() - before
    of_ddp = CountingGroup.collectives - collectives
    return asked - Counts(collectives=-of_ddp), RankWaits.count - waits


def count(variants: dict[str, Step], steps: int) -> list[Row]:
    asked, waits = {}, {}
    for variant, step in variants.items():
        warm_up(step)
        asked[variant], waits[variant] = counted(step, steps)
    rows = []
    for variant in list(variants)[1:]:
        added = asked[variant] - asked["torch"]
        values = {field.name: getattr(added, field.name) / steps for field in fields(Counts)}
        rows.append(Row(variant, **values, rank_waits=waits[variant] / steps))
    return rows


def table(rows: list[Row]) -> list[str]:
    names = [field.name for field in fields(Row)]
    head = "#" + f"{names[0]:>11}" + "".join(f"{name:>13}" for name in names[1:])
    return [head] + [
        f"{row.variant:>12}" + "".join(f"{value:>13.1f}" for value in astuple(row)[1:])
        for row in rows
    ]


# --- the host's time


def host_s(step: Step, steps: int) -> float:
    """Return the median time until a step returns, on an idle device."""
    warm_up(step)
    times = []
    for _ in range(steps):
        torch.accelerator.synchronize()
        hvd.barrier()
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def cpu_s(step: Step, steps: int) -> float:
    """Return the median processor time of a step in autograd's thread of the device.

    Other load on the machine does not count in it.
    """
    warm_up(step)
    stamps.clear()
    for _ in range(steps + 1):
        torch.accelerator.synchronize()
        hvd.barrier()
        step()
    return statistics.median(later - earlier for earlier, later in pairwise(stamps))


def measure(variants: dict[str, Step], steps: int, rounds: int) -> list[HostRow]:
    """Time torch and torch_ring in turns. DDP's group here is Python, which costs more."""
    timed = {name: variants[name] for name in ("torch", AGREED, AHEAD)}
    wall, cpu = (
        medians(in_turns({n: partial(clock, step, steps) for n, step in timed.items()}, rounds))
        for clock in (host_s, cpu_s)
    )
    return [
        HostRow(n, wall[n] * 1e6, wall[n] / wall["torch"], cpu[n] * 1e6, cpu[n] / cpu["torch"])
        for n in timed
    ]


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    load_stand_ins()
    hvd.init()
    start_counting_group()
    RankWaits.watch()
    facts = machine()
    what = f"what {args.parameters} parameters add to a step on a stand-in for a GPU"
    log(title(what, facts))
    variants = steps_of(args.parameters)
    rows = count(variants, args.steps)
    log(*table(rows))
    host = measure(variants, args.steps, args.rounds)
    log(
        f"#{'':>11}{'host (us)':>13}{'ratio':>13}{'cpu (us)':>13}{'ratio':>13}",
        *(
            f"{row.variant:>12}{row.step_us:>13.1f}{row.ratio:>13.3f}"
            f"{row.cpu_us:>13.1f}{row.cpu_ratio:>13.3f}"
            for row in host
        ),
    )
    write_report(args.json, facts, rows, host=host)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
