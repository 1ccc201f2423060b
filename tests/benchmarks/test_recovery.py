"""recovery.py kills ranks, cuts a host off, and reports how soon the others train again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from init_scale import why_no_namespaces
from launcher_commands import clean_environment
from recovery_jobs import row_of
from scripts import DEADLINE_S, ROOT

import torch_ring

BENCHMARKS = ROOT / "benchmarks"


def report_of(*arguments: str, folder: Path) -> dict[str, Any]:
    folders = (str(BENCHMARKS), str(Path(torch_ring.__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "recovery.py"), *arguments, "--json", "out.json"],
        cwd=folder,
        env=clean_environment(PYTHONPATH=os.pathsep.join(folders)),
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE_S,  # it starts jobs one after the other, or waits for a silent host
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return report


@pytest.mark.slow
def test_forked_worlds(tmp_path: Path) -> None:
    rounds = ("--kills", "4", "--cuts", "1", "--states", "1", "--megabytes", "1", "--jobs", "0")
    rows = report_of(*rounds, folder=tmp_path)["rows"]
    among_hosts = why_no_namespaces() is None
    killed = [f"killed: rank {rank}" for rank in range(4)]
    expected = [(what, 1) for what in [*killed, "killed: any"]] + [("cut off", 2)] * among_hosts
    expected += [("state", 1), ("broadcast", 1)] + [("state", 2), ("broadcast", 2)] * among_hosts
    assert [(row["what"], row["hosts"]) for row in rows] == expected
    for row in rows:
        assert row["error"] is None
        assert row["ranks"] == 4
        assert row["least_ms"] <= row["median_ms"] <= row["most_ms"]
        assert (row["step_ms"] is not None) == (row["what"] not in ("state", "broadcast"))
    assert [row["rounds"] for row in rows[:5]] == [1, 1, 1, 1, 4]


def test_steps_of_survivors_that_the_launcher_ends_do_not_count() -> None:
    of_4 = [(9.0, 4, 1, 0), (9.9, 4, 2, 0)]
    alone = [(10.2, 3, 3, 0)]
    new = {3: [(14.0, 4, 3, 0)], 4: [(14.5, 4, 3, 1)]}
    row = row_of("torchrun", 1, {2: of_4 + alone, **new}, 10.0)
    assert (row.again_s, row.whole_s) == (4.5, 4.5)
    assert row.steps_s == [-1.0, -0.1, 0.2, 4.0]
    row = row_of("torch_ring", 1, {2: of_4 + alone + [(14.6, 4, 4, 0)], 4: new[4]}, 10.0)
    assert row.again_s == pytest.approx(0.2)
    assert row.whole_s == pytest.approx(4.5)
