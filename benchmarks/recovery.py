"""Times how soon an elastic training goes on when ranks die.

    python benchmarks/recovery.py --json recovery.json
    python benchmarks/recovery.py --kills 100 --cuts 0 --jobs 0     # killed ranks of one host only

Four parts, each left out with 0 rounds: ranks of one host are killed; one of two hosts (network
namespaces, as root) is cut off; a newcomer takes a state; a rank is killed under a launcher, beside
torchrun. The first three fork their ranks from this process, which has imported all modules.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # no library may have threads: a process with threads must not fork
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"

import machine
import namespaces
import recovery_jobs
import recovery_worlds
import torch
from init_scale import why_no_namespaces
from recovery_worlds import Recovery
from start_line import SIGNALS, WorldError


@dataclass(frozen=True)
class Row:
    """One part, over its rounds.

    Attributes:
        what: "killed: rank 0", "cut off", "state", "broadcast".
        median_ms, least_ms, most_ms: after a death, the time until the end of the slowest
            survivor's first step, without a step's time (and without the heartbeat timeout); for a
            state or a broadcast, the time until the slowest rank has it.
        step_ms: the median of the survivors' steps.
        error: the reason why there are no numbers.
    """

    what: str
    ranks: int
    hosts: int
    rounds: int
    median_ms: float | None = None
    least_ms: float | None = None
    most_ms: float | None = None
    step_ms: float | None = None
    error: str | None = None

    def __str__(self) -> str:
        start = f"{self.what:<18}{self.hosts:6}{self.ranks:6}{self.rounds:7}"
        if self.error is not None:
            return f"{start}  {self.error}"
        times = (self.median_ms, self.least_ms, self.most_ms, self.step_ms)
        return start + "".join(f"{'' if ms is None else format(ms, '.1f'):>10}" for ms in times)


COLUMNS = (
    f"{'# what':<18}{'hosts':>6}{'ranks':>6}{'rounds':>7}{'median ms':>10}{'least':>10}"
    f"{'most':>10}{'step':>10}"
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="of a world; half of them on a host")
    parser.add_argument("--kills", type=int, default=40, help="killed ranks; each in turn")
    parser.add_argument("--cuts", type=int, default=5, help="hosts that are cut off")
    parser.add_argument("--states", type=int, default=15, help="states that a newcomer takes")
    parser.add_argument("--megabytes", type=int, default=100, help="of a state")
    parser.add_argument("--jobs", type=int, default=3, help="killed ranks under each launcher")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the deaths")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = parser.parse_args()
    if args.ranks < 4 or args.ranks % 2 or args.megabytes < 1:
        parser.error("--ranks is even, and 4 at least; --megabytes is 1 at least")
    if args.kills and args.kills < args.ranks:
        parser.error("--kills is 0, or as many as there are ranks")
    return args


def row_of(what: str, ranks: int, hosts: int, found: Sequence[Recovery]) -> Row:
    return row_of_times(
        what, ranks, hosts, [one.ms for one in found], [one.step_ms for one in found]
    )


def row_of_times(
    what: str, ranks: int, hosts: int, ms: Sequence[float], steps_ms: Sequence[float] = ()
) -> Row:
    step_ms = statistics.median(steps_ms) if steps_ms else None
    return Row(what, ranks, hosts, len(ms), statistics.median(ms), min(ms), max(ms), step_ms)


def kills(args: argparse.Namespace) -> list[Row]:
    found = recovery_worlds.kills(args.ranks, args.kills, args.seed)
    rows = [row_of(f"killed: rank {rank}", args.ranks, 1, found[rank]) for rank in sorted(found)]
    return [*rows, row_of("killed: any", args.ranks, 1, [*itertools.chain(*found.values())])]


def cuts(args: argparse.Namespace) -> list[Row]:
    found = recovery_worlds.cuts(args.ranks // 2, args.cuts, args.seed)
    return [row_of("cut off", args.ranks, 2, found)]


def states(args: argparse.Namespace, hosts: int) -> list[Row]:
    if hosts == 1:
        found = recovery_worlds.states(args.ranks, (), args.megabytes, args.states)
    else:
        with namespaces.hosts(hosts) as made:
            found = recovery_worlds.states(args.ranks, made, args.megabytes, args.states)
    return [
        row_of_times("state", args.ranks, hosts, [1e3 * one.state_s for one in found]),
        row_of_times("broadcast", args.ranks, hosts, [1e3 * one.broadcast_s for one in found]),
    ]


def measure(args: argparse.Namespace) -> list[Row]:
    """Print and return the rows of the forked worlds."""
    print(COLUMNS, flush=True)
    none = why_no_namespaces() if args.cuts or args.states else None
    parts: list[tuple[str, int, int, Callable[[argparse.Namespace], list[Row]]]] = [
        ("killed", 1, args.kills, kills),
        ("cut off", 2, args.cuts, cuts),
        ("state", 1, args.states, functools.partial(states, hosts=1)),
        ("state", 2, args.states, functools.partial(states, hosts=2)),
    ]
    rows: list[Row] = []
    for what, hosts, rounds, part in parts:
        if not rounds:
            continue
        if hosts > 1 and none:
            print(f"# {what}, {hosts} hosts: not run: {none}", flush=True)
            continue
        try:
            found = part(args)
        except (WorldError, OSError) as error:
            found = [Row(what, args.ranks, hosts, rounds, error=str(error))]
        print(*found, sep="\n", flush=True)
        rows += found
    return rows


def measure_jobs(count: int) -> list[recovery_jobs.JobRow]:
    """Print and return the results of killed ranks, under each launcher in turn."""
    rows = []
    for index in range(count):
        for name in recovery_jobs.JOBS:
            row = recovery_jobs.killed(name, index % 4)
            print(
                f"# {name}: rank {row.victim} killed: goes on after {1e3 * row.again_s:.0f} ms, "
                f"four ranks after {row.whole_s:.2f} s",
                flush=True,
            )
            rows.append(row)
    return rows


def end_in_order(*_: Any) -> None:
    """Exit after an uninterrupted clean-up."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit("recovery.py: ended")


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    for number in SIGNALS:
        signal.signal(number, end_in_order)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the program waits for something
    facts = machine.computer()
    print(machine.title("training goes on", facts), flush=True)
    rows = measure(args)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    jobs, error = [], None
    try:
        jobs = measure_jobs(args.jobs)
    except (WorldError, OSError) as failure:
        error = str(failure)
        print(f"# {error}", flush=True)
    if args.json:
        report = {"command": f"python {shlex.join(sys.argv)}", "machine": facts}
        report |= {"rows": rows, "jobs": jobs}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, default=asdict, indent=1) + "\n")
    return int(error is not None or any(row.error is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
