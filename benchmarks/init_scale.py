# SPDX-License-Identifier: Apache-2.0
"""Times the start of a world by its number of ranks: init() with its first allreduce.

    python benchmarks/init_scale.py --json init_scale.json --plot init_scale.png
    python benchmarks/init_scale.py --sizes 2 8 --namespaces     # no network namespaces
    python benchmarks/init_scale.py --sizes --namespaces 8 --peers --tls    # and encrypted
    python benchmarks/init_scale.py --death                      # until all know of a killed rank

The ranks are forked from this process, which has imported all modules. The namespaces need root.
"""

from __future__ import annotations

import argparse
import encodings.idna  # noqa: F401  socket.getaddrinfo() imports it; here once for all ranks
import functools
import os
import re
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # no library may have threads: a process with threads must not fork
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"

import machine
import namespaces
import torch
import torch.distributed as dist
from hosts import variables
from namespaces import HERE, Host, free_port
from waiting_ranks import (
    COUNT,
    READY_S,
    SIGNALS,
    Line,
    Ranks,
    WorldError,
    forked,
    started_by_mpirun,
    sum_at_start,
    why_no_mpi,
)

import torch_ring as hvd
import torch_ring.api  # here once for all ranks

SIZES = [2, 4, 8, 16, 32, 64, 128, 256, 512]
NAMESPACES = [4, 8, 16]
FULL_ROUNDS = 32  # ranks up to which every round is measured; twice as many get half of them
PROGRAM_S = 15.0  # the program gives a world up so much later than the library
SETTLE_S = 1.0  # until all ranks wait in the allreduce


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--death", action="store_true", help="time the news of a killed rank")
    parser.add_argument("--sizes", type=int, nargs="*", help="ranks on this host; with --death 128")
    parser.add_argument("--namespaces", type=int, nargs="*", help="hosts; with --death 16")
    parser.add_argument("--ranks-per-host", type=int, default=8, help="in a namespace")
    parser.add_argument("--peers", nargs="*", choices=("gloo", "mpi"), default=["gloo", "mpi"])
    parser.add_argument("--tls", action="store_true", help="time torch_ring with TLS, too")
    parser.add_argument("--rounds", type=int, default=5, help=f"of up to {FULL_ROUNDS} ranks")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one world")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as a PNG")
    args = parser.parse_args()
    if args.plot and args.death:
        parser.error("--plot draws the start of worlds only")
    if args.sizes is None:
        args.sizes = [128] if args.death else SIZES
    if args.namespaces is None:
        args.namespaces = [16] if args.death else NAMESPACES
    worlds = [*args.sizes, *(count * args.ranks_per_host for count in args.namespaces)]
    if min([*worlds, 2]) < 2 or args.rounds < 1:
        parser.error("a world has at least 2 ranks, and there is at least 1 round")
    return args


# --- worlds


Layout = tuple[int, Sequence[Host]]
"""A number of ranks, and their hosts."""


def layouts(sizes: Sequence[int], hosts: Sequence[int], ranks_per_host: int) -> Iterator[Layout]:
    """Yield the worlds to start, the small ones first; their namespaces last until the next."""
    for size in sorted(sizes):
        yield size, [HERE]
    if hosts and (missing := namespaces.why_none()):
        print(f"# namespaces: not run: {missing}", flush=True)
        return
    for count in sorted(hosts):
        with namespaces.hosts(count) as made:
            yield count * ranks_per_host, made


def environment(
    hosts: Sequence[Host], size: int, timeout_s: float, network: str = "tcp"
) -> Callable[[int], Mapping[str, str]]:
    """Return a function that returns a rank's variables in a new world, as torchrun sets them."""
    port = str(free_port())
    common = {
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": f"init_scale-{os.getpid()}-{port}",
        "TORCH_RING_INIT_TIMEOUT": str(timeout_s),
        "TORCH_RING_TIMEOUT": str(timeout_s),
        "TORCH_RING_LOG_LEVEL": "error",
    }
    return lambda rank: variables(hosts, size // len(hosts), rank, network) | common


def by_torch_ring(line: Line, _timeout_s: float) -> None:
    """Run as a rank of torch_ring; the timeout is in the environment."""

    def start() -> Sequence[float]:
        hvd.init()
        return hvd.allreduce_(torch.full((COUNT,), float(line.rank)), op=hvd.Sum).tolist()

    sum_at_start(line, start, hvd.shutdown)


def by_gloo(line: Line, timeout_s: float) -> None:
    """Run as a rank of torch.distributed over gloo, which needs a descriptor for every rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def start() -> Sequence[float]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        total = torch.full((COUNT,), float(line.rank))
        dist.all_reduce(total)
        return total.tolist()

    sum_at_start(line, start, dist.destroy_process_group)


# --- the start of a world


@dataclass(frozen=True)
class Row:
    """The start of a world with one library: medians of its rounds.

    Attributes:
        seconds: from the opening of the gate to the last rank's result; the least and the most of
            the rounds.
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
            f"{self.mib_a_rank:9.1f}{ratio}"
        )


COLUMNS = (
    f"{'# hosts':>6} {'ranks':>5} {'library':<11}{'rounds':>7}{'seconds':>10}{'least':>10}"
    f"{'most':>10}{'MiB':>9}{'ratio':>8}"
)
Open = Callable[[], AbstractContextManager[Ranks]]


def starters(
    size: int, hosts: Sequence[Host], peers: Sequence[str], timeout_s: float
) -> dict[str, Open]:
    """Return, by library, a function that starts ranks, which wait for the gate."""

    def of_fork(be_rank: Callable[[Line, float], None], network: str = "tcp") -> Open:
        def body(line: Line) -> None:
            be_rank(line, timeout_s)

        return lambda: forked(size, body, environment(hosts, size, timeout_s, network), hosts)

    found = {"torch_ring": of_fork(by_torch_ring)}
    if "tls" in peers and len(hosts) > 1:
        found["with TLS"] = of_fork(by_torch_ring, "tls")
    if "gloo" in peers:
        found["gloo"] = of_fork(by_gloo)
    if "mpi" in peers and len(hosts) == 1:  # mpirun starts ranks in other namespaces by ssh only
        found["mpi"] = functools.partial(started_by_mpirun, size)
    return found


def sample(start: Open, timeout_s: float) -> tuple[float, float]:
    """Start a world once; return the seconds, and the MiB of a rank.

    Raises:
        WorldError: it has failed, or has not begun in time.
    """
    with start() as ranks:
        pids = [report["pid"] for report in ranks.gather(READY_S)]
        began = ranks.open_gate()
        ended = max(report["ended"] for report in ranks.gather(timeout_s + PROGRAM_S))
        mib = pss_mib(pids[len(pids) // 2])
        ranks.open_gate()
        ranks.gather(READY_S)  # all have checked the result
    return ended - began, mib


def pss_mib(pid: int) -> float:
    """Return a process's memory; memory shared by n processes counts as an n-th to each."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def rows_of(
    size: int, hosts: int, starts: dict[str, Open], rounds: int, timeout_s: float
) -> list[Row]:
    """Start worlds with the libraries in turns."""
    samples: dict[str, list[tuple[float, float]]] = {library: [] for library in starts}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for library, start in starts.items():
            if library not in errors:
                try:
                    samples[library].append(sample(start, timeout_s))
                except (WorldError, OSError) as error:
                    errors[library] = str(error)
    rows: dict[str, Row] = {}
    for library, of_one in samples.items():
        if library in errors:
            rows[library] = Row(size, hosts, library, len(of_one), error=errors[library])
            continue
        seconds, mib = zip(*of_one, strict=True)
        median, ours = statistics.median(seconds), rows.get("torch_ring")
        ratio = median / ours.seconds if ours and ours.seconds else None
        times = (median, min(seconds), max(seconds))
        memory = statistics.median(mib)
        rows[library] = Row(size, hosts, library, len(of_one), *times, memory, ratio)
    return list(rows.values())


def measure(args: argparse.Namespace, worlds_of: Iterator[Layout]) -> list[Row]:
    """Start worlds of all sizes; a library that fails at one is not tried at larger ones."""
    peers = [*args.peers, *(["tls"] if args.tls else [])]
    if "mpi" in peers and (missing := why_no_mpi()):
        print(f"# mpi: not run: {missing}", flush=True)
        peers.remove("mpi")
    print(COLUMNS, flush=True)
    rows: list[Row] = []
    for size, hosts in worlds_of:
        rounds = max(1, min(args.rounds, args.rounds * FULL_ROUNDS // size))
        starts = starters(size, hosts, peers, args.timeout)
        of_kind = [row for row in rows if (len(hosts) > 1) == (row.hosts > 1)]
        for row in of_kind:
            if row.error is not None:
                starts.pop(row.library, None)
        for library in list(starts):
            mib = next((r.mib_a_rank for r in reversed(of_kind) if r.library == library), None)
            if mib and (error := why_too_large(size * mib)):
                rows.append(Row(size, len(hosts), library, 0, error=error))
                print(rows[-1], flush=True)
                del starts[library]
        found = rows_of(size, len(hosts), starts, rounds, args.timeout)
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


# --- the errors after a rank's death


@dataclass(frozen=True)
class DeathRow:
    """The death of a rank: the time from the kill to the others' PeerLostErrors.

    Attributes:
        victim: the rank that is killed.
        heard: survivors with a PeerLostError whose text has the victim's number.
        otherwise: survivors with another error, or one that does not name the victim.
        example: the text of a survivor's error: the slowest one's, or one of `otherwise`.
        error: the reason why there are no numbers, such as survivors that know of nothing.
    """

    ranks: int
    hosts: int
    victim: int
    heard: int = 0
    otherwise: int = 0
    slowest_ms: float | None = None
    median_ms: float | None = None
    example: str = ""
    error: str | None = None
    library: str = "torch_ring"

    def __str__(self) -> str:
        start = f"{self.hosts:7}{self.ranks:7}{self.victim:8}"
        if self.slowest_ms is None:
            return f"{start} {self.error or self.example}"
        numbers = f"{self.slowest_ms:11.1f}{self.median_ms:11.1f}{self.heard:7}{self.otherwise:11}"
        return f"{start}{numbers}" + (f"  {self.example}" if self.otherwise else "")


DEATH_COLUMNS = (
    f"{'# hosts':>7}{'ranks':>7}{'victim':>8}{'slowest ms':>11}{'median ms':>11}{'heard':>7}"
    f"{'otherwise':>11}"
)


def deaths(layouts: Iterator[Layout], timeout_s: float) -> list[DeathRow]:
    """Kill a rank in the middle, then in another world rank 0, in each layout."""
    print(DEATH_COLUMNS, flush=True)
    rows = []
    for size, hosts in layouts:
        for victim in (size // 2 + 1 if size > 2 else 1, 0):
            try:
                row = death(size, hosts, victim, timeout_s)
            except (WorldError, OSError) as error:
                row = DeathRow(size, len(hosts), victim, error=str(error))
            print(row, flush=True)
            rows.append(row)
    return rows


def death(size: int, hosts: Sequence[Host], victim: int, timeout_s: float) -> DeathRow:
    body = functools.partial(wait_for_a_rank, victim=victim)
    with forked(size, body, environment(hosts, size, timeout_s), hosts) as ranks:
        ranks.gather(READY_S)
        ranks.open_gate()
        pids = [report["pid"] for report in ranks.gather(timeout_s + PROGRAM_S)]
        ranks.open_gate()
        time.sleep(SETTLE_S)
        killed = ranks.kill(victim, pids[victim])
        told = ranks.gather(timeout_s + PROGRAM_S)
    news = sorted(told, key=lambda report: float(report["heard"]))
    heard = [report for report in news if report["kind"] == "PeerLostError" and report["named"]]
    others = [report for report in news if report not in heard]
    delays_ms = [1e3 * (report["heard"] - killed) for report in heard]
    return DeathRow(
        size,
        len(hosts),
        victim,
        len(heard),
        len(others),
        max(delays_ms, default=None),
        statistics.median(delays_ms) if delays_ms else None,
        next(report["text"] for report in [*others, *reversed(heard)]),
    )


def wait_for_a_rank(line: Line, victim: int) -> None:
    """Run as a rank that waits in an allreduce for the victim, or as the victim."""
    line.report()
    line.wait()
    hvd.init()
    hvd.allreduce(torch.ones(1), name="before")
    line.report(pid=os.getpid())
    line.wait()
    if line.rank == victim:
        line.wait()  # to be killed
        return
    kind, text = "no error", ""
    try:
        hvd.allreduce(torch.ones(1), name="that the victim never joins")
    except hvd.RingError as error:
        kind, text = type(error).__name__, str(error)
    named = re.search(rf"\brank {victim}\b", text) is not None
    line.report(heard=time.monotonic(), kind=kind, named=named, text=text)
    line.wait()
    hvd.shutdown()


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
    facts = machine.computer()
    what = "the news of a killed rank" if args.death else "the start of a world"
    print(machine.title(what, facts), flush=True)
    rows: Sequence[Row] | Sequence[DeathRow]
    with closing(layouts(args.sizes, args.namespaces, args.ranks_per_host)) as worlds_of:
        rows = deaths(worlds_of, args.timeout) if args.death else measure(args, worlds_of)
    machine.save(args.json, "python", facts, rows)
    if args.plot:
        import plots  # it needs matplotlib, and starts threads

        report = {"machine": facts, "rows": [asdict(row) for row in rows]}
        plots.draw_one({"init_scale": report}, "init_scale", args.plot)
    return int(any(row.library == "torch_ring" and row.error is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
