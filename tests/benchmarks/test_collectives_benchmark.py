"""The benchmark of the collectives: it checks what it times."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import ROOT, run


def test_benchmark_checks_what_it_times(tmp_path: Path) -> None:
    collectives = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall")
    first, second = run(
        ROOT / "benchmarks" / "collectives.py",
        *("--collective", *collectives, "--max-bytes", "4096", "--shared"),
        *("--peers", "gloo", "ring-c10d"),
        *("--rounds", "1", "--iterations", "5", "--json", "out.json"),
        folder=tmp_path,
    )
    assert (first.code, second.code) == (0, 0), first.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["collective"], row["bytes"], row["memory"]) for row in rows] == [
        (collective, size, memory)
        for collective in collectives
        for size in (1024, 4096)
        for memory in ("private", "shared")
    ]
    for row in rows:
        wrong = {library: result["wrong"] for library, result in row["results"].items()}
        assert wrong == {"torch_ring": 0, "gloo": 0, "ring-c10d": 0}
