"""Measures what the ranks' agreement at the end of a backward pass costs between hosts. Needs root.

    python benchmarks/agreement_cost.py --hosts 2 --rate 1gbit --models pinn mnist

Each host is a network namespace with one rank. It takes steps in turns as they are, and without the
agreement: each rank then believes that all have the gradients that it has. That is the most that a
step could gain without it. A gain below 0 is noise.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hosts import started, variables
from machine import log, machine, title, write_report
from namespaces import Host, hosts
from replicas import Replica, replicas_of
from turns import in_turns, seconds
from workloads import WORKLOADS

import torch_ring as hvd
from torch_ring._C import Engine

WARM_UP_STEPS = 3  # buckets are planned again
DEADLINE_S = 600


@dataclass(frozen=True)
class Row:
    """A model's step; medians of the rounds, of the slowest rank."""

    model: str
    step_ms: float
    without_ms: float  # the agreement
    gain: float  # share of the step that the agreement takes
    least_wait_us: float  # for the agreement, on rank 0: it came last
    is_right: bool  # whether all ranks have the same weights in the end


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", help="that a host may send, as tc has it: 1gbit; else unlimited")
    parser.add_argument("--models", choices=WORKLOADS, nargs="+", default=["pinn", "mnist"])
    parser.add_argument("--rounds", type=int, default=15, help="each variant is timed once a round")
    parser.add_argument("--round-s", type=float, default=1.0, help="a variant's part of a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the ranks


def steps_without(agreement: bool, replica: Replica, steps: int, waits: list[float]) -> float:
    """Time steps, with the agreement of reports or without it; `waits` gets the time in each."""
    gather = Engine.gather_reports

    def timed(engine: Engine, *arguments: Any) -> bytes:
        begun = time.perf_counter()
        gathered = gather(engine, *arguments)
        waits.append(time.perf_counter() - begun)
        return gathered

    def assumed(_engine: Engine, _agreement: object, report: bytes) -> bytes:
        return report * hvd.size()

    Engine.gather_reports = timed if agreement else assumed
    try:
        return seconds(replica.step, steps)
    finally:
        Engine.gather_reports = gather


def measure(args: argparse.Namespace, model: str) -> Row:
    replica = replicas_of(WORKLOADS[model], None, ("torch_ring",))["torch_ring"]
    for _ in range(WARM_UP_STEPS):
        replica.step()
    (estimate,) = in_turns({"": lambda: seconds(replica.step, 1)}, 1)[""]
    steps, waits = max(1, round(args.round_s / estimate)), list[float]()
    times = in_turns(
        {
            agreement: partial(steps_without, agreement, replica, steps, waits)
            for agreement in (True, False)
        },
        args.rounds,
    )
    pairs = list(zip(times[True], times[False], strict=True))
    return Row(
        model,
        statistics.median(times[True]) * 1e3,
        statistics.median(times[False]) * 1e3,
        statistics.median(1 - without / step for step, without in pairs),
        min(waits) * 1e6,
        is_same_on_all_ranks(replica),
    )


def is_same_on_all_ranks(replica: Replica) -> bool:
    weights = [weight.detach() for weight in replica.parameters]
    largest = hvd.grouped_allreduce(weights, op=hvd.Max)
    return all(map(torch.equal, largest, weights))


def be_a_rank(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    hvd.init()
    facts = machine()
    what = f"the agreement between {args.hosts} hosts, rate {args.rate}"
    log(
        title(what, facts),
        f"#{'model':>9}{'step (ms)':>12}{'without':>10}{'gain (%)':>10}{'wait (us)':>11}",
    )
    rows = []
    for model in args.models:
        row = measure(args, model)
        log(
            f"{row.model:>10}{row.step_ms:>12.3f}{row.without_ms:>10.3f}{row.gain * 100:>10.1f}"
            f"{row.least_wait_us:>11.0f}"
        )
        rows.append(row)
    write_report(args.json, facts, rows)
    hvd.shutdown()
    return int(not all(row.is_right for row in rows))


# --- the hosts


def start_ranks(found: Sequence[Host]) -> int:
    """Run this program on a rank of each host; return 0 if all succeed."""
    commands = []
    for rank, host in enumerate(found):
        pairs = [f"{name}={value}" for name, value in variables(found, 1, rank).items()]
        commands.append(
            host.command("env", *pairs, sys.executable, __file__, "--rank", *sys.argv[1:])
        )
    deadline = time.monotonic() + DEADLINE_S
    with started(commands) as processes:
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if any(codes) or None not in codes:
                return int(any(codes))
            time.sleep(0.1)
    log(f"the ranks still run after {DEADLINE_S} s")
    return 1


def main() -> int:
    args = parse_args()
    if args.rank:
        return be_a_rank(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("agreement_cost.py: ended"))  # clean up first
    with hosts(args.hosts, args.rate) as found:
        return start_ranks(found)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        sys.exit(f"agreement_cost.py: {error}")
