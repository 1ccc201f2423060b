"""deaths(), sets(), groups(): how soon ranks learn of a killed rank; the cost of unused sets."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import FORK_S, forked
from namespaces import Host
from start_line import Line, WorldError, signals_taken
from world_starts import PROGRAM_S, environment

import torch_ring as hvd

SETTLE_S = 1.0  # until all ranks wait in the allreduce
OF_RANKS = 4  # ranks of a process set
FEWEST_RANKS = 8  # of the world with process sets


# --- the errors after a rank's death


@dataclass(frozen=True)
class DeathRow:
    """The death of a rank: the time from the kill to the others' PeerLostErrors.

    Attributes:
        victim: the rank that is killed.
        heard: survivors with a PeerLostError whose text has the victim's number.
        otherwise: survivors with another error, or one that does not name the victim.
        unaware: survivors with no error before the deadline.
        example: the text of a survivor's error: the slowest one's, or one of `otherwise`.
    """

    ranks: int
    hosts: int
    victim: int
    heard: int = 0
    otherwise: int = 0
    unaware: int = 0
    slowest_ms: float | None = None
    median_ms: float | None = None
    example: str = ""
    error: str | None = None
    library: str = "torch_ring"

    def __str__(self) -> str:
        start = f"{self.hosts:7}{self.ranks:7}{self.victim:8}"
        if self.error is not None:
            return f"{start} {self.error}"
        times = "".join(
            " " * 11 if ms is None else f"{ms:11.1f}" for ms in (self.slowest_ms, self.median_ms)
        )
        numbers = f"{self.heard:7}{self.otherwise:11}{self.unaware:9}"
        told = "" if self.error is None and not self.otherwise else f"  {self.example}"
        return f"{start}{times}{numbers}{told}"


DEATH_COLUMNS = (
    f"{'# hosts':>7}{'ranks':>7}{'victim':>8}{'slowest ms':>11}{'median ms':>11}{'heard':>7}"
    f"{'otherwise':>11}{'unaware':>9}"
)


def deaths(layouts: Iterable[tuple[int, Sequence[Host]]], timeout_s: float) -> list[DeathRow]:
    """Kill a rank in the middle, then in another world rank 0, in each layout."""
    print(DEATH_COLUMNS, flush=True)
    rows = []
    for size, hosts in layouts:
        for victim in (size // 2 + 1 if size > 2 else 1, 0):
            try:
                row = death(size, hosts, victim, timeout_s)
            except (WorldError, OSError) as error:
                row = DeathRow(size, max(1, len(hosts)), victim, error=str(error))
            print(row, flush=True)
            rows.append(row)
    return rows


def death(size: int, hosts: Sequence[Host], victim: int, timeout_s: float) -> DeathRow:
    body = functools.partial(wait_for_a_rank, victim=victim)
    with forked(size, body, environment(hosts, size, timeout_s), hosts) as ranks:
        ranks.gather(FORK_S)
        ranks.open_gate()
        pids = [report["pid"] for report in ranks.gather(timeout_s + PROGRAM_S)]
        ranks.open_gate()
        with signals_taken():
            time.sleep(SETTLE_S)
        killed = ranks.kill(victim, pids[victim])
        told, _ = ranks.gather_until(timeout_s + PROGRAM_S)
    news = sorted(told.values(), key=lambda report: float(report["heard"]))
    heard = [report for report in news if report["kind"] == "PeerLostError" and report["named"]]
    others = [report for report in news if report not in heard]
    delays_ms = [1e3 * (report["heard"] - killed) for report in heard]
    return DeathRow(
        size,
        max(1, len(hosts)),
        victim,
        len(heard),
        len(others),
        size - 1 - len(news),
        max(delays_ms, default=None),
        statistics.median(delays_ms) if delays_ms else None,
        next((report["text"] for report in [*others, *reversed(heard)]), ""),
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


# --- process sets, and groups of torch.distributed


@dataclass(frozen=True)
class SetsRow:
    """The cost of unused process sets or groups: sums over all ranks for each set.

    Attributes:
        kib, descriptors, threads: the use of all ranks together, for each set.
        kib_a_rank, descriptors_a_rank, threads_a_rank: the average use of one rank, before any set
            and after all of them.
    """

    ranks: int
    sets: int
    seconds: float | None = None
    kib: float | None = None
    descriptors: float | None = None
    threads: float | None = None
    kib_a_rank: tuple[float, float] = (0, 0)
    descriptors_a_rank: tuple[float, float] = (0, 0)
    threads_a_rank: tuple[float, float] = (0, 0)
    error: str | None = None
    library: str = "torch_ring"

    def __str__(self) -> str:
        start = f"{self.ranks:7}{self.sets:6} {self.library:<11}"
        if self.error is not None:
            return f"{start} {self.error}"
        pairs = (self.kib_a_rank, self.descriptors_a_rank, self.threads_a_rank)
        of_ranks = "".join(f"{f'{before:.0f} - {after:.0f}':>18}" for before, after in pairs)
        return (
            f"{start}{self.seconds:9.2f}{self.kib:9.1f}{self.descriptors:13.2f}"
            f"{self.threads:9.2f}{of_ranks}"
        )


SETS_COLUMNS = (
    f"{'# ranks':>7}{'sets':>6} {'library':<11}{'seconds':>9}{'KiB':>9}{'descriptors':>13}"
    f"{'threads':>9}{'KiB a rank':>18}{'descriptors':>18}{'threads':>18}"
)


def sets(count: int, timeout_s: float) -> list[SetsRow]:
    """Make process sets, of four ranks each, in the smallest world with `count` such sets."""
    return rows_of(count, {"torch_ring": make_sets}, timeout_s)


def groups(count: int, timeout_s: float) -> list[SetsRow]:
    """Make groups of torch.distributed of the same ranks, with the backend ring and with gloo."""
    bodies = {
        backend: functools.partial(make_groups, backend=backend, timeout_s=timeout_s)
        for backend in ("ring", "gloo")
    }
    return rows_of(count, bodies, timeout_s)


def rows_of(count: int, bodies: dict[str, Callable[..., None]], timeout_s: float) -> list[SetsRow]:
    """Make sets with each library, by `bodies`; they take the line and the ranks of the sets."""
    print(SETS_COLUMNS, flush=True)
    size = next(n for n in itertools.count(FEWEST_RANKS) if math.comb(n, OF_RANKS) >= count)
    rows = []
    for library, body in bodies.items():
        try:
            row = made_sets(size, members(size, count), timeout_s, library, body)
        except (WorldError, OSError) as error:
            row = SetsRow(size, count, error=str(error), library=library)
        print(row, flush=True)
        rows.append(row)
    return rows


def members(size: int, count: int) -> list[list[int]]:
    """Return the ranks of each set: all sets differ, and are spread over the ranks."""
    every = list(itertools.combinations(range(size), OF_RANKS))
    return [list(every[i * len(every) // count]) for i in range(count)]


def made_sets(
    size: int,
    ranks_of_sets: list[list[int]],
    timeout_s: float,
    library: str,
    make: Callable[..., None],
) -> SetsRow:
    body = functools.partial(make, ranks_of_sets=ranks_of_sets)
    with forked(size, body, environment((), size, timeout_s)) as ranks:
        ranks.gather(FORK_S)
        ranks.open_gate()
        before = ranks.gather(timeout_s + PROGRAM_S)
        began = ranks.open_gate()
        after = ranks.gather(timeout_s + PROGRAM_S)
        ranks.open_gate()
        ranks.gather(timeout_s + PROGRAM_S)  # all have used a set
    count = len(ranks_of_sets)
    means = {
        what: (
            statistics.mean(report[what] for report in before),
            statistics.mean(report[what] for report in after),
        )
        for what in ("kib", "descriptors", "threads")
    }
    of_a_set = {what: (last - first) * size / count for what, (first, last) in means.items()}
    return SetsRow(
        size,
        count,
        max(report["ended"] for report in after) - began,
        of_a_set["kib"],
        of_a_set["descriptors"],
        of_a_set["threads"],
        means["kib"],
        means["descriptors"],
        means["threads"],
        library=library,
    )


def make_sets(line: Line, ranks_of_sets: list[list[int]]) -> None:
    """Run as a rank that makes process sets, and finally uses one of them."""
    line.report()
    line.wait()
    hvd.init()
    hvd.allreduce(torch.ones(1))
    line.report(**resources())
    line.wait()
    made = [hvd.add_process_set(ranks) for ranks in ranks_of_sets]
    line.report(ended=time.monotonic(), **resources())
    line.wait()
    last = made[-1]
    if last.included():
        total = hvd.allreduce(torch.tensor(float(line.rank)), op=hvd.Sum, process_set=last)
        if total.item() != sum(ranks_of_sets[-1]):
            raise ValueError(f"the allreduce of set {ranks_of_sets[-1]} returned {total.item()}")
    line.report()
    hvd.shutdown()


def make_groups(line: Line, ranks_of_sets: list[list[int]], backend: str, timeout_s: float) -> None:
    """Run as a rank that makes groups of torch.distributed, and finally uses one of them."""
    line.report()
    line.wait()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    dist.all_reduce(torch.ones(1))
    line.report(**resources())
    line.wait()
    made = [dist.new_group(ranks) for ranks in ranks_of_sets]
    line.report(ended=time.monotonic(), **resources())
    line.wait()
    if line.rank in ranks_of_sets[-1]:
        total = torch.tensor(float(line.rank))
        dist.all_reduce(total, group=made[-1])
        if total.item() != sum(ranks_of_sets[-1]):
            raise ValueError(f"the sum over group {ranks_of_sets[-1]} is {total.item()}")
    line.report()
    dist.barrier()
    dist.destroy_process_group()


def resources() -> dict[str, int]:
    """Return this process's resident memory, open descriptors and threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])
    descriptors, threads = (len(os.listdir(f"/proc/self/{of}")) for of in ("fd", "task"))
    return {"kib": kib, "descriptors": descriptors, "threads": threads}
