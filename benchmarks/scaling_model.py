"""Predicts the scaling of a training step: a calibrated model of latency and bandwidth.

    python benchmarks/scaling_model.py --json benchmarks/results/scaling_model.json

The model is fitted to Horovod's published efficiencies on up to 512 GPUs and checked on cells that
the fit has not seen. Then it predicts torch_ring's efficiency on the same machines, and on today's,
and counts what a world of so many ranks needs beside its network. None of its output was measured
here. docs/internals/measurements.md has its assumptions, and how its form was chosen.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from clusters import A100, H100, TCP, VARIANTS, Cluster, efficiency, on_pascal
from layers import Job, job_of
from steps import FUSION_BYTES, Link, Step, horovod_step, ring_s
from world_limits import limits_of, needs_of

MODELS = {"inception_v3": 134.4, "resnet101": 119.4, "vgg16": 130.9}  # images/s on one Pascal GPU
IMAGES = 64  # in a batch of a GPU
# Scaling efficiency by GPUs, as published by Horovod, in the order of MODELS: 4 Pascal GPUs a
# server, RDMA over 25 Gbit/s. 512: its docs/benchmarks; 128: its README before that.
PUBLISHED = {16: (0.941, 0.914, 0.853), 128: (0.90, 0.90, 0.79), 512: (0.90, 0.90, 0.68)}
HELD_OUT = 512  # GPUs that the second fit does not see
MOST_RANKS = 100_000
NEEDS_OF = (512, 4096, 32_768, MOST_RANKS)  # sizes of worlds whose needs are printed
GOOD, HALF = 0.9, 0.5  # efficiencies: the model finds the most GPUs that reach them


# --- published efficiencies


@dataclass(frozen=True)
class Horovod:
    """The three unknowns of the published curves.

    Attributes:
        link: the link of each hop in a ring of all GPUs.
        slowdown: the relative slowdown of computation during communication.
    """

    link: Link
    slowdown: float

    def efficiency(self, step: Step, ranks: int) -> float:
        """Return the time of a step on one GPU over that on `ranks`."""
        time_s = step.time_s(lambda b: ring_s(b, ranks, self.link), self.slowdown)
        return step.compute_s / time_s


def fit(steps: Sequence[Step], published: dict[int, tuple[float, ...]]) -> Horovod:
    """Return the least-squares fit to the published efficiencies.

    Args:
        steps: steps on one GPU, with Horovod's buckets.
        published: the efficiency of each step, by number of GPUs.
    """
    from scipy.optimize import minimize

    def model(unknowns: Sequence[float]) -> Horovod:
        gigabytes_per_s, latency_us, slowdown_percent = map(abs, unknowns)
        return Horovod(Link(gigabytes_per_s * 1e9, latency_us / 1e6), slowdown_percent / 100)

    def error(unknowns: Sequence[float]) -> float:
        candidate = model(unknowns)
        return sum(
            (candidate.efficiency(step, ranks) - efficiency) ** 2
            for ranks, efficiencies in published.items()
            for step, efficiency in zip(steps, efficiencies, strict=True)
        )

    line_rate = 25 / 8  # GB/s: the search begins here
    found = minimize(error, (line_rate, 20, 1), method="Nelder-Mead")
    return model(found.x.tolist())


@dataclass(frozen=True)
class Cell:
    """One published efficiency, and the model's."""

    model: str
    gpus: int
    published: float
    fitted: float  # to all cells
    held_out: float  # to the cells of fewer than HELD_OUT GPUs


def cells_of(steps: dict[str, Step], fitted: Horovod, held_out: Horovod) -> list[Cell]:
    return [
        Cell(
            model,
            gpus,
            published,
            fitted.efficiency(steps[model], gpus),
            held_out.efficiency(steps[model], gpus),
        )
        for gpus, efficiencies in PUBLISHED.items()
        for model, published in zip(MODELS, efficiencies, strict=True)
    ]


# --- predictions


@dataclass(frozen=True)
class Curve:
    """A variant's efficiency on a cluster, by ranks, and the most ranks with GOOD and with HALF.

    Attributes:
        ends_by: "latency" or "bandwidth", the one that costs more at the first number of ranks
            below GOOD; if there is none, at MOST_RANKS.
    """

    cluster: str
    model: str
    variant: str
    ranks: list[int]
    efficiencies: list[float]
    good_up_to: int
    half_up_to: int
    ends_by: str


def curve(cluster: Cluster, model: str, job: Job, variant: str, slowdown: float) -> Curve:
    ranks = list(rank_counts(cluster.gpus_per_host))
    efficiencies = [efficiency(job, cluster, VARIANTS[variant], n, slowdown) for n in ranks]

    def up_to(wanted: float) -> int:
        reached = [n for n, e in zip(ranks, efficiencies, strict=True) if e >= wanted]
        return max(reached, default=1)

    worse = [n for n, e in zip(ranks, efficiencies, strict=True) if e < GOOD]
    ends_by = end_of(cluster, job, variant, min(worse, default=MOST_RANKS), slowdown)
    good, half = up_to(GOOD), up_to(HALF)
    return Curve(cluster.name, model, variant, ranks, efficiencies, good, half, ends_by)


def end_of(cluster: Cluster, job: Job, variant: str, ranks: int, slowdown: float) -> str:
    """Return "latency" or "bandwidth", the one that costs more efficiency."""

    def without(latency: float, time_of_a_byte: float) -> float:
        network, local, control = (
            Link(link.bandwidth / time_of_a_byte, link.latency_s * latency)
            for link in (cluster.network, cluster.local, cluster.control)
        )
        better = replace(cluster, network=network, local=local, control=control)
        return efficiency(job, better, VARIANTS[variant], ranks, slowdown)

    return "latency" if without(0.0, 1.0) > without(1.0, 1e-9) else "bandwidth"


def rank_counts(gpus_per_host: int) -> Iterator[int]:
    """Yield numbers of GPUs: a host's, twice as many, and so on."""
    ranks = gpus_per_host
    while ranks < MOST_RANKS:
        yield ranks
        ranks *= 2
    yield MOST_RANKS


def table(
    cells: Sequence[Cell], fits: dict[str, Horovod], curves: Sequence[Curve]
) -> Iterator[str]:
    for name, found in fits.items():
        link = f"{found.link.bandwidth / 1e9:.2f} GB/s, {found.link.latency_s * 1e6:.1f} us"
        yield f"# {name}: {link}, computing slower by {found.slowdown:.1%}"
    yield f"#{'model':>14}{'GPUs':>6}{'published':>11}{'fitted':>9}{'held out':>10}   (%)"
    for cell in cells:
        seen = f"{cell.held_out * 100:>10.1f}" if cell.gpus == HELD_OUT else ""
        yield (
            f"{cell.model:>15}{cell.gpus:>6}{cell.published * 100:>11.1f}"
            f"{cell.fitted * 100:>9.1f}{seen}"
        )
    yield f"# GPUs up to which the efficiency is {GOOD:.0%}, {HALF:.0%}, and that of {MOST_RANKS}"
    columns = f"{GOOD:>8.0%}{HALF:>8.0%}{MOST_RANKS:>8}  ends by"
    yield f"#{'cluster':>10}{'model':>14}{'variant':>32}{columns}"
    for c in curves:
        yield (
            f"{c.cluster:>11}{c.model:>14}{c.variant:>32}{c.good_up_to:>8}{c.half_up_to:>8}"
            f"{c.efficiencies[-1]:>8.1%}  {c.ends_by}"
        )


def limits_table(ranks_per_host: int) -> Iterator[str]:
    yield f"# What a world needs beside its network, {ranks_per_host} ranks a host"
    names = f"{'control':>9}{'data':>6}{'alltoall':>10}{'store ops':>11}{'table':>12}{'s':>9}"
    yield f"#{'ranks':>9}{names}"
    for ranks in NEEDS_OF:
        n = needs_of(ranks, ranks_per_host, TCP)
        yield (
            f"{n.ranks:>10}{n.control:>9}{n.data:>6}{n.alltoall:>10}{n.store_operations:>11}"
            f"{n.table_bytes:>12}{n.store_s:>9.3f}"
        )
    yield "# up to how many ranks"
    for what, ranks in limits_of(ranks_per_host, TCP):
        yield f"{ranks or 'any':>10}  {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = parser.parse_args()

    steps = {
        name: horovod_step(job_of(name, IMAGES, rate), FUSION_BYTES)
        for name, rate in MODELS.items()
    }
    seen = {gpus: cells for gpus, cells in PUBLISHED.items() if gpus != HELD_OUT}
    fits = {
        "all cells": fit(list(steps.values()), PUBLISHED),
        f"without {HELD_OUT} GPUs": fit(list(steps.values()), seen),
    }
    fitted = fits["all cells"]
    cells = cells_of(steps, *fits.values())
    curves = [
        curve(
            cluster,
            model,
            job_of(model, cluster.images, rate).faster(cluster.speed),
            variant,
            fitted.slowdown,
        )
        for cluster in (on_pascal(fitted.link), A100, H100)
        for model, rate in MODELS.items()
        for variant in VARIANTS
    ]
    per_host = A100.gpus_per_host
    print(*table(cells, fits, curves), *limits_table(per_host), sep="\n")
    if args.json:
        named = {name: asdict(found) for name, found in fits.items()}
        report = {"command": f"python {shlex.join(sys.argv)}", "fits": named}
        report |= {"rows": [asdict(cell) for cell in cells], "curves": [asdict(c) for c in curves]}
        report["needs"] = [asdict(needs_of(ranks, per_host, TCP)) for ranks in NEEDS_OF]
        report["limits"] = dict(limits_of(per_host, TCP))
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
