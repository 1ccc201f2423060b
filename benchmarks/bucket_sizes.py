"""Compares what autotuning predicts for sizes of buckets with what steps then take.

    sudo python benchmarks/hosts.py --rate 1gbit --program bucket_sizes.py

The optimizer is tuned first (TORCH_RING_AUTOTUNE=1). Then steps with the default sizes, with those
that were chosen, and with others take turns with one without communication. It needs several hosts:
on one, gradients are reduced when backward has ended, and sizes do not matter.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import log, machine, title, write_report
from replicas import Replica, replicas_of
from turns import in_turns, seconds
from workloads import WORKLOADS

import torch_ring as hvd
from torch_ring.optimizer.autotuner import Autotuner
from torch_ring.optimizer.bucket_tuning import BucketLimits, Prediction, best_limits

MIB = 1 << 20
OTHERS = ((1, 0.0625), (4, 0.25), (8, 4), (64, 1), (256, 16))  # MiB of a bucket, and of the last
MOST_STEPS = 100  # until the buckets have been tuned


@dataclass(frozen=True)
class Row:
    """Steps with buckets of one size; times are medians of the rounds."""

    bucket_bytes: int
    last_bucket_bytes: int
    is_chosen: bool
    predicted_ms: float  # after backward
    step_ms: float
    exposed_ms: float  # more than a step without communication


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, default="resnet18")
    parser.add_argument("--batch", type=int, help="of a rank; else the model's own")
    parser.add_argument("--rounds", type=int, default=7, help="each size is timed once a round")
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def tuned(replica: Replica) -> Autotuner:
    """Train until the buckets have been tuned; return what has tuned them."""
    for _ in range(MOST_STEPS):
        replica.step()
        tuner = replica.optimizer._reducer._tuner
        if tuner is None and replica.optimizer._reducer._order_is_real:
            sys.exit("bucket_sizes.py: there is nothing to tune on one host")
        if tuner is not None and tuner.is_done:
            return tuner
    raise RuntimeError(f"the buckets have not been tuned within {MOST_STEPS} steps")


def measure(args: argparse.Namespace) -> list[Row]:
    replicas = replicas_of(WORKLOADS[args.model], args.batch, ("torch", "torch_ring"))
    replica = replicas["torch_ring"]
    tuner = tuned(replica)
    reducer = replica.optimizer._reducer
    chosen: BucketLimits = reducer._limits
    predicted = {each.limits: each for each in tuner.predicted}
    default = tuner.predicted[0].limits
    best = best_limits(tuner.predicted).limits
    others = [BucketLimits(int(a * MIB), int(b * MIB)) for a, b in OTHERS]
    compared: list[Prediction] = [
        predicted[limits]
        for limits in dict.fromkeys([default, best, *others])
        if limits in predicted
    ]

    def timed(limits: BucketLimits) -> float:
        reducer._set_limits(limits)
        replica.step()
        return seconds(replica.step, args.steps)

    turns: dict[object, Callable[[], float]] = {
        each.limits: lambda limits=each.limits: timed(limits) for each in compared
    }
    turns["torch"] = lambda: seconds(replicas["torch"].step, args.steps)
    times = in_turns(turns, args.rounds)
    return [
        Row(
            each.limits.capacity_bytes,
            each.limits.last_bytes,
            each.limits == chosen,
            1e3 * each.exposed_s,
            1e3 * statistics.median(times[each.limits]),
            1e3
            * statistics.median(
                a - b for a, b in zip(times[each.limits], times["torch"], strict=True)
            ),
        )
        for each in compared
    ]


def main() -> int:
    args = parse_args()
    os.environ["TORCH_RING_AUTOTUNE"] = "1"
    torch.set_num_threads(1)  # a rank has a core
    logging.getLogger("torch_ring").setLevel(logging.INFO)
    hvd.init()
    facts = machine()
    rows = measure(args)
    log(
        title(f"a step of {args.model}, by the sizes of buckets", facts),
        f"#{'bucket':>9}{'the last':>10}{'predicted':>11}{'exposed':>9}{'step':>9}",
        f"#{'(MiB)':>9}{'(MiB)':>10}{'(ms)':>11}{'(ms)':>9}{'(ms)':>9}",
        *(
            f"{row.bucket_bytes / MIB:>10g}{row.last_bucket_bytes / MIB:>10g}"
            f"{row.predicted_ms:>11.1f}{row.exposed_ms:>9.1f}{row.step_ms:>9.1f}"
            f"{'  chosen' if row.is_chosen else ''}"
            for row in rows
        ),
    )
    write_report(args.json, facts, rows)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
