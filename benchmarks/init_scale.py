"""Times the start of a world by its number of ranks: init() with its first allreduce.

    python benchmarks/init_scale.py --json init_scale.json --plot init_scale.png python
    benchmarks/init_scale.py --sizes 2 8 --namespaces            # no network namespaces python
    benchmarks/init_scale.py --death             # until all know of a killed rank python
    benchmarks/init_scale.py --sets 500          # unused process sets python
    benchmarks/init_scale.py --groups 500        # the same as new_group(), beside gloo's

The ranks are forked from this process, which has imported all modules. The namespaces need root.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # no library may have threads: a process with threads must not fork
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"

import machine
import namespaces
import scale_checks
import torch
import world_starts
from forked_ranks import FORK_S, forked
from mpi_ranks import started_by_mpirun, why_no_mpi
from namespaces import Host
from start_line import SIGNALS, Line, Ranks, WorldError, pss_mib

SIZES = [2, 4, 8, 16, 32, 64, 128, 256, 512]
NAMESPACES = [4, 8, 16]
FULL_ROUNDS = 32  # ranks up to which every round is measured; twice as many get half of them


@dataclass(frozen=True)
class Row:
    """The start of a world with one library: medians of its rounds.

    Attributes:
        seconds: from the opening of the gate to the last rank's result; the least and the most of
            the rounds.
        cpu_ms_a_rank: CPU time of all threads of all ranks, divided by the number of ranks.
        mib_a_rank: memory of one rank; memory shared by n ranks counts as an n-th to each.
        ratio: seconds / torch_ring's.
        error: the reason why there are no numbers; the library is not tried with more ranks.
    """

    ranks: int
    hosts: int
    library: str
    rounds: int
    seconds: float | None = None
    least_s: float | None = None
    most_s: float | None = None
    cpu_ms_a_rank: float | None = None
    mib_a_rank: float | None = None
    ratio: float | None = None
    error: str | None = None

    def __str__(self) -> str:
        start = f"{self.hosts:6} {self.ranks:6} {self.library:<11}"
        if self.error is not None:
            return f"{start} {self.error}"
        ratio = "" if self.ratio is None else f"{self.ratio:8.2f}"
        return (
            f"{start}{self.rounds:7}{self.seconds:10.3f}{self.least_s:10.3f}{self.most_s:10.3f}"
            f"{self.cpu_ms_a_rank:10.1f}{self.mib_a_rank:9.1f}{ratio}"
        )


COLUMNS = (
    f"{'# hosts':>6} {'ranks':>5} {'library':<11}{'rounds':>7}{'seconds':>10}{'least':>10}"
    f"{'most':>10}{'cpu ms':>10}{'MiB':>9}{'ratio':>8}"
)


@dataclass(frozen=True)
class Sample:
    """One start of a world."""

    seconds: float
    cpu_ms_a_rank: float
    mib_a_rank: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--death", action="store_true", help="time the news of a killed rank")
    what.add_argument(
        "--sets", type=int, nargs="?", const=500, metavar="COUNT", help="make process sets"
    )
    what.add_argument(
        "--groups", type=int, nargs="?", const=500, metavar="COUNT", help="call new_group()"
    )
    parser.add_argument("--sizes", type=int, nargs="*", help="ranks on this host; with --death 128")
    parser.add_argument("--namespaces", type=int, nargs="*", help="hosts; with --death 16")
    parser.add_argument("--ranks-per-host", type=int, default=8, help="in a namespace")
    parser.add_argument("--peers", nargs="*", choices=("gloo", "mpi"), default=["gloo", "mpi"])
    parser.add_argument("--rounds", type=int, default=5, help=f"of up to {FULL_ROUNDS} ranks")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one world")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as a PNG")
    args = parser.parse_args()
    if args.plot and (args.death or args.sets is not None or args.groups is not None):
        parser.error("--plot draws the start of worlds only")
    smallest = min([*(args.sizes or []), args.ranks_per_host * 2])
    counts = [*(args.namespaces or []), args.ranks_per_host, args.rounds]
    counts += [1 if count is None else count for count in (args.sets, args.groups)]
    if smallest < 2 or min(counts) < 1:
        parser.error("a world has at least 2 ranks, and there is at least 1 of all else")
    args.sizes = ([128] if args.death else SIZES) if args.sizes is None else args.sizes
    if args.namespaces is None:
        args.namespaces = [16] if args.death else NAMESPACES
    return args


Layout = tuple[int, Sequence[Host]]
"""A number of ranks, and their namespaces; empty: the ranks stay in this one."""


def layouts(sizes: Sequence[int], hosts: Sequence[int], ranks_per_host: int) -> Iterator[Layout]:
    """Yield the worlds to start, the small ones first; their namespaces last until the next."""
    for size in sorted(sizes):
        yield size, ()
    if hosts and (missing := why_no_namespaces()):
        print(f"# namespaces: not run: {missing}", flush=True)
        return
    for count in sorted(hosts):
        with namespaces.hosts(count) as made:
            yield count * ranks_per_host, made


def why_no_namespaces() -> str | None:
    if os.geteuid() != 0:
        return "they need root"
    try:
        with namespaces.hosts(1):
            return None
    except OSError as error:  # no `ip`, or a container without the right
        return str(error)


# --- the start of a world


Open = Callable[[], AbstractContextManager[Ranks]]


def starters(
    size: int, hosts: Sequence[Host], peers: Sequence[str], timeout_s: float
) -> dict[str, Open]:
    """Return, by library, a function that starts ranks, which wait for the gate."""
    found: dict[str, Open] = {}
    for library in ("torch_ring", *peers):
        if library != "mpi":
            found[library] = functools.partial(new_world, size, hosts, library, timeout_s)
        elif not hosts:  # mpirun starts its ranks in other namespaces by ssh only
            found[library] = functools.partial(started_by_mpirun, size)
    return found


def new_world(
    size: int, hosts: Sequence[Host], library: str, timeout_s: float
) -> AbstractContextManager[Ranks]:
    def body(line: Line) -> None:
        world_starts.LIBRARIES[library](line, timeout_s)

    return forked(size, body, world_starts.environment(hosts, size, timeout_s), hosts)


def sample(start: Open, timeout_s: float) -> Sample:
    """Start a world once.

    Raises:
        WorldError: it has failed, or has not begun in time.
    """
    with start() as ranks:
        pids = [report["pid"] for report in ranks.gather(FORK_S)]
        began = ranks.open_gate()
        ended = max(report["ended"] for report in ranks.gather(timeout_s + world_starts.PROGRAM_S))
        memory = pss_mib(pids[len(pids) // 2])
        ranks.open_gate()
        spent = [report["cpu_s"] for report in ranks.gather(FORK_S)]
    return Sample(ended - began, 1e3 * statistics.mean(spent), memory)


def rows_of(
    size: int, hosts: int, starts: dict[str, Open], rounds: int, timeout_s: float
) -> list[Row]:
    """Start worlds with the libraries in turns."""
    samples: dict[str, list[Sample]] = {library: [] for library in starts}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for library, start in starts.items():
            if library not in errors:
                try:
                    samples[library].append(sample(start, timeout_s))
                except (WorldError, OSError) as error:
                    errors[library] = str(error)
    medians = {
        library: statistics.median(one.seconds for one in of_one)
        for library, of_one in samples.items()
        if library not in errors
    }
    return [
        Row(size, hosts, library, len(of_one), error=errors[library])
        if library in errors
        else Row(
            size,
            hosts,
            library,
            len(of_one),
            medians[library],
            min(one.seconds for one in of_one),
            max(one.seconds for one in of_one),
            statistics.median(one.cpu_ms_a_rank for one in of_one),
            statistics.median(one.mib_a_rank for one in of_one),
            medians[library] / medians["torch_ring"]
            if library != "torch_ring" and "torch_ring" in medians
            else None,
        )
        for library, of_one in samples.items()
    ]


def measure(args: argparse.Namespace, worlds_of: Iterator[Layout]) -> list[Row]:
    """Start worlds of all sizes; a library that fails at one is not tried at larger ones."""
    peers = list(args.peers)
    if "mpi" in peers and (missing := why_no_mpi()):
        print(f"# mpi: not run: {missing}", flush=True)
        peers.remove("mpi")
    print(COLUMNS, flush=True)
    rows: list[Row] = []
    for size, hosts in worlds_of:
        rounds = max(1, min(args.rounds, args.rounds * FULL_ROUNDS // size))
        starts = starters(size, hosts, peers, args.timeout)
        of_kind = [row for row in rows if bool(hosts) == (row.hosts > 1)]
        for row in of_kind:
            if row.error is not None:
                starts.pop(row.library, None)
        for library in list(starts):
            mib = next((r.mib_a_rank for r in reversed(of_kind) if r.library == library), None)
            if mib and (error := why_too_large(size * mib)):
                rows.append(Row(size, max(1, len(hosts)), library, 0, error=error))
                print(rows[-1], flush=True)
                del starts[library]
        found = rows_of(size, max(1, len(hosts)), starts, rounds, args.timeout)
        print(*found, sep="\n", flush=True)
        rows += found
    return rows


def why_too_large(mib: float) -> str | None:
    """Return the reason why ranks that need `mib` are not started here, if any."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]) / 1024
    if mib < available:
        return None
    return f"not tried: needs {mib:.0f} MiB as before for each rank; {available:.0f} are available"


# --- the program


def end_in_order(*_: object) -> NoReturn:
    """Exit after an uninterrupted clean-up."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit("init_scale.py: ended")


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    for number in SIGNALS:
        signal.signal(number, end_in_order)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the program waits for something
    facts = machine.computer()
    what = "the start of a world"
    if args.death:
        what = "the news of a killed rank"
    elif args.sets is not None:
        what = "process sets that nobody uses"
    elif args.groups is not None:
        what = "groups of torch.distributed that nobody uses"
    print(machine.title(what, facts), flush=True)
    rows: Sequence[Any]
    with closing(layouts(args.sizes, args.namespaces, args.ranks_per_host)) as worlds_of:
        if args.death:
            rows = scale_checks.deaths(worlds_of, args.timeout)
        elif args.sets is not None:
            rows = scale_checks.sets(args.sets, args.timeout)
        elif args.groups is not None:
            rows = scale_checks.groups(args.groups, args.timeout)
        else:
            rows = measure(args, worlds_of)
    if args.json:
        report = {"command": f"python {shlex.join(sys.argv)}", "machine": facts, "rows": rows}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, default=asdict, indent=1) + "\n")
    if args.plot:
        import plots  # it needs matplotlib, and starts threads

        report = {"machine": facts, "rows": [asdict(row) for row in rows]}
        plots.draw_one({"init_scale": report}, "init_scale", args.plot)
    ours = ("torch_ring", "ring")
    failed = [row for row in rows if row.library in ours and row.error is not None]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
