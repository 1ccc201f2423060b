# SPDX-License-Identifier: Apache-2.0
"""Compares the results with torch_ring's targets.

    python benchmarks/targets.py [benchmarks/results]

A result is a ratio of times within one run, so a slow machine slows both sides. "reached" and
"wanted" have the same unit; more is better, except for those marked "<". "bare" is the same run
without a library, if it was timed: only to read the data once and write the result (the peer
`touch`, which a result that is written past the caches may beat; in shared memory `copy`), or to
send the bytes as fast as the network's measuring tool.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = dict[str, Any]
KB, MB = 1 << 10, 1 << 20
PEERS = {"gloo": "gloo", "mpi": "Open MPI"}


@dataclass(frozen=True)
class Target:
    """One target, and the value that was reached."""

    what: str
    peer: str
    reached: float
    wanted: float
    at_most: bool = False
    bare: float | None = None

    @property
    def met(self) -> bool:
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted

    @property
    def verdict(self) -> str:
        if self.met:
            return ""
        return "missed" if self.bare is None or self.bare >= self.wanted else "missed, bare too"


def load(folder: Path) -> dict[str, Report]:
    """Return the reports in the folder, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def targets(reports: dict[str, Report]) -> Iterator[Target]:
    """Yield the targets of all given reports."""
    if "allreduce" in reports:
        rows = reports["allreduce"]["rows"]
        yield from of_private(rows)
        yield from of_shared(rows)
        yield from of_dtypes(rows)
    yield from of_ratios(
        reports,
        "collectives",
        {"allgather": 10, "reducescatter": 10, "broadcast": 5, "alltoall": 10},
    )
    for row in rows_of(reports, "oversubscribed"):
        if row["bytes"] in (KB, 16 * MB):
            yield of_row(f"4 ranks, {size(row)}", row, "gloo", 5)
    for hosts in (2, 3):
        yield from of_hosts(reports, hosts)
    yield from of_training(rows_of(reports, "training_step"))
    yield from of_distributed(rows_of(reports, "distributed"))
    for hosts, suffix in ((1, ""), (2, "-2-hosts")):
        where = "" if hosts == 1 else f"{hosts} hosts, "
        yield from of_ddp(rows_of(reports, f"training_step{suffix}"), where)
        yield from of_fsdp(rows_of(reports, f"sharded_step{suffix}"), where)
    yield from of_training(rows_of(reports, "overhead"))
    yield from of_init(rows_of(reports, "init_scale"))
    for row in rows_of(reports, "death"):
        if row["slowest_ms"] is not None:
            what = (
                f"rank {row['victim']} of {row['ranks']}, {row['hosts']} hosts, killed: known (s)"
            )
            yield Target(what, "", row["slowest_ms"] / 1e3, 1, at_most=True)
    for row in rows_of(reports, "recovery"):
        if wanted_ms := {"killed": 150, "cut off": 300}.get(row["what"]):
            what = f"{row['ranks']} ranks, {row['what']}: train on (ms)"
            yield Target(what, "", row["median_ms"], wanted_ms, at_most=True)
        if "standby" in row["what"]:
            yield Target("a standby process trains (s)", "", row["whole_s"], 1, at_most=True)


def of_row(what: str, row: Report, peer: str, wanted: float) -> Target:
    """Return the target of a row: its speed relative to a peer's."""
    ratios = row["ratios"]
    bare = ratios[peer] / ratios["touch"] if "touch" in ratios else None
    return Target(what, PEERS[peer], ratios[peer], wanted, bare=bare)


def of_private(rows: Sequence[Report]) -> Iterator[Target]:
    # By bytes: the wanted multiple of each peer's speed.
    wanted = {
        KB: {"gloo": 40, "mpi": 1 / 2},
        64 * KB: {"gloo": 30, "mpi": 3},
        MB: {"gloo": 20, "mpi": 4},
        16 * MB: {"gloo": 10, "mpi": 4},
        64 * MB: {"gloo": 10, "mpi": 4},
    }
    for row in of_kind(rows, "float32", "private"):
        for peer, speed in wanted.get(row["bytes"], {}).items():
            if peer in row["ratios"]:
                yield of_row(f"allreduce {size(row)}", row, peer, speed)


def of_shared(rows: Sequence[Report]) -> Iterator[Target]:
    private = {row["bytes"]: row for row in of_kind(rows, "float32", "private")}
    for row in of_kind(rows, "float32", "shared"):
        if row["bytes"] >= MB:
            what = f"allreduce {size(row)}, shared"
            speed = time_us(private[row["bytes"]]) / time_us(row)
            copy = row["ratios"].get("copy")  # a copy's time over ours
            yield Target(what, "private", speed, 2, bare=None if copy is None else speed / copy)
            if copy is not None:
                yield Target(what, "a copy's time", 1 / copy, 1.5, at_most=True)


def of_dtypes(rows: Sequence[Report]) -> Iterator[Target]:
    for memory in ("private", "shared"):
        float32 = {row["bytes"]: time_us(row) for row in of_kind(rows, "float32", memory)}
        for dtype in ("bfloat16", "float16"):
            of_dtype = of_kind(rows, dtype, memory)
            if not of_dtype:
                continue
            slowest = max(of_dtype, key=lambda row: time_us(row) / float32[row["bytes"]])
            reached = time_us(slowest) / float32[slowest["bytes"]]
            what = f"allreduce {dtype}, {memory}, worst: {size(slowest)}"
            yield Target(what, "float32's time", reached, 1.3, at_most=True)


def of_ratios(reports: dict[str, Report], name: str, wanted: dict[str, float]) -> Iterator[Target]:
    """Yield the worst size of each collective."""
    rows = rows_of(reports, name)
    for collective, speed in wanted.items():
        of_one = [row for row in rows if row["collective"] == collective]
        if of_one:
            worst = min(of_one, key=lambda row: row["ratios"]["gloo"])
            yield of_row(f"{collective}, worst: {size(worst)}", worst, "gloo", speed)


def of_hosts(reports: dict[str, Report], hosts: int) -> Iterator[Target]:
    rows = rows_of(reports, f"hosts-{hosts}")
    if not rows:
        return
    traffic = reports[f"hosts-{hosts}"]["traffic"]
    without = (traffic["before_gb_per_s"] + traffic["after_gb_per_s"]) / 2

    def share(row: Report) -> float:
        return row["results"]["torch_ring"]["busbw"] / without

    for small, speed in ((True, 5), (False, 1.5)):
        of_size = [row for row in rows if (row["bytes"] <= 64 * KB) == small]
        if of_size:
            worst = min(of_size, key=lambda row: row["ratios"]["gloo"])
            what = f"{hosts} hosts, allreduce, worst: {size(worst)}"
            reached = worst["ratios"]["gloo"]
            yield Target(what, "gloo", reached, speed, bare=reached / share(worst))
    for row in rows:
        if row["bytes"] == 64 * MB:
            what = f"{hosts} hosts, allreduce 64 MB, share"
            yield Target(what, traffic["tool"], share(row), 0.85)


def of_training(rows: Iterable[Report]) -> Iterator[Target]:
    models: dict[str, dict[str, Report]] = {}
    for row in rows:
        models.setdefault(row["model"], {})[row["variant"]] = row
    for model, variants in models.items():
        ours, ddp = variants["torch_ring"], variants["ddp"]
        share = ours["exposed_ms"] / max(ddp["exposed_ms"], 1e-9)
        yield Target(f"{model}: exposed communication", "DDP's", share, 1 / 8, at_most=True)
        # The same, without the time that ranks lose only by waiting for one another.
        if ddp.get("beyond_ms", 0) > 0:
            share = ours["beyond_ms"] / ddp["beyond_ms"]
            yield Target(f"{model}: exposed, beyond waiting", "DDP's", share, 1 / 8, at_most=True)
        if model in ("resnet50", "vgg16"):
            share = ours["exposed_ms"] / ours["step_ms"]
            yield Target(f"{model}: exposed, share of the step", "", share, 0.03, at_most=True)
        if model not in ("pinn", "parameters"):  # they compute next to nothing
            yield Target(f"{model}: efficiency", "no communication", ours["efficiency"], 0.95)


def of_distributed(rows: Iterable[Report]) -> Iterator[Target]:
    # By collective and bytes: the wanted multiple of gloo's speed under torch.distributed.
    wanted = {
        "allreduce": {KB: 30, 64 * KB: 30, MB: 8, 64 * MB: 5},
        "allgather": {16 * MB: 4},
        "reducescatter": {16 * MB: 4},
    }
    for row in rows:
        speed = wanted.get(row["collective"], {}).get(row["bytes"])
        if speed is not None:
            results = row["results"]
            reached = results["gloo"]["time_us"] / results["ring-c10d"]["time_us"]
            what = f"torch.distributed, {row['collective']} {size(row)}"
            yield Target(what, "gloo", reached, speed)


def of_ddp(rows: Iterable[Report], where: str) -> Iterator[Target]:
    steps_ms = {row["variant"]: row["step_ms"] for row in rows if row["model"] == "resnet18"}
    if "ddp_ring" in steps_ms:
        share = steps_ms["ddp_ring"] / steps_ms["torch_ring"]
        what = f"{where}resnet18: DDP's step over ring"
        yield Target(what, "our optimizer's", share, 1.1, at_most=True)


def of_fsdp(rows: Iterable[Report], where: str) -> Iterator[Target]:
    for row in rows:
        if row["variant"] == "ring":
            what = f"{where}FSDP2's communication over ring"
            yield Target(what, "gloo's", row["of_gloo"], 0.5, at_most=True)


def of_init(rows: Sequence[Report]) -> Iterator[Target]:
    for what, many in (("one host", False), ("many hosts", True)):
        of_gloo = [
            row
            for row in rows
            if row["library"] == "gloo" and row["ratio"] and (row["hosts"] > 1) == many
        ]
        if of_gloo:
            worst = min(of_gloo, key=lambda row: row["ratio"])
            what = f"init(), {what}, worst: {worst['ranks']} ranks"
            yield Target(what, "gloo", worst["ratio"], 1)
    for row in rows:
        wanted_s = {128: 3, 512: 15}.get(row["ranks"])
        if row["library"] == "torch_ring" and row["hosts"] == 1 and row["seconds"] and wanted_s:
            what = f"init() of {row['ranks']} ranks (s)"
            yield Target(what, "", row["seconds"], wanted_s, at_most=True)


# --- of rows


def rows_of(reports: dict[str, Report], name: str) -> list[Report]:
    return reports[name]["rows"] if name in reports else []


def of_kind(rows: Iterable[Report], dtype: str, memory: str) -> list[Report]:
    return [row for row in rows if (row["type"], row["memory"]) == (dtype, memory)]


def time_us(row: Report) -> float:
    return row["results"]["torch_ring"]["time_us"]


def size(row: Report) -> str:
    return f"{row['bytes'] // MB} MB" if row["bytes"] >= MB else f"{row['bytes'] // KB} KB"


def table(found: Iterable[Target]) -> Iterator[str]:
    yield f"#{'what':>43}{'peer':>18}{'reached':>9}{'wanted':>9}{'bare':>9}"
    for target in found:
        wanted = f"{'<' if target.at_most else '>'} {target.wanted:.4g}"
        bare = "" if target.bare is None else f"{target.bare:.3g}"
        numbers = f"{target.reached:>9.3g}{wanted:>9}{bare:>9}"
        yield f"{target.what:>44}{target.peer:>18}{numbers}  {target.verdict}".rstrip()


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    print(*table(targets(load(folder))), sep="\n")
