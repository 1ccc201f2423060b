"""recovery.py kills ranks, cuts a host off, and reports how soon the others train again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_commands import clean_environment
from namespaces import why_none
from recovery import Step, loss_of
from scripts import DEADLINE_S, ROOT

import torch_ring

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.slow
def test_losses(tmp_path: Path) -> None:
    cases = ["killed", "cut off", "torch_ring, standby"]
    folders = (str(BENCHMARKS), str(Path(torch_ring.__file__).parents[1]))
    options = ["--cases", *cases, "--rounds", "1", "--json", "out.json"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "recovery.py"), *options],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=os.pathsep.join(folders)),
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE_S,  # one case after the other
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    if why_none() is not None:
        cases.remove("cut off")
    assert [row["what"] for row in rows] == cases
    for row in rows:
        assert (row["ranks"], row["rounds"]) == (4, 1)
        assert row["hosts"] == (2 if row["what"] == "cut off" else 1)
        assert row["median_ms"] == row["least_ms"] == row["most_ms"]
        assert row["step_ms"] > 0
        assert (row["whole_s"] is not None) == (row["what"] == cases[-1])
        assert row["steps_per_s"][0] > 0
    assert "# killed: rank 0 lost: goes on after " in done.stdout


def test_steps_of_survivors_that_the_launcher_ends_do_not_count() -> None:
    of_4 = [Step(9.0, 4, 0), Step(9.9, 4, 0)]
    alone = [Step(10.2, 3, 0)]
    new = {3: [Step(14.0, 4, 0)], 4: [Step(14.5, 4, 1)]}
    loss = loss_of({2: of_4 + alone, **new}, 10.0)
    step_s = (0.9 + 0.3) / 2
    assert (loss.ms, loss.whole_s) == pytest.approx((1e3 * (4.5 - step_s), 4.5))
    # Quarters of a second from -2 to 4: those with steps of rank 0 are at -1, -0.25 and 0.
    assert [index for index, rate in enumerate(loss.steps_per_s) if rate] == [4, 7, 8]
    assert len(loss.steps_per_s) == 24
    loss = loss_of({2: [*of_4, *alone, Step(14.6, 4, 0)], 4: new[4]}, 10.0, heartbeat_s=0.1)
    assert loss.ms == pytest.approx(1e3 * (0.2 - 0.9 - 0.1))
    assert loss.whole_s == pytest.approx(4.5)


def test_without_a_launcher_the_survivors_alone_count() -> None:
    dead = [Step(9.0, 4, 1), Step(9.5, 4, 1)]
    survivors = [[Step(9.0, 4, rank), Step(9.5, 4, rank)] for rank in (0, 2)]
    survivors[0].append(Step(10.25, 3, 0))
    survivors[1].append(Step(10.75, 3, 1))
    loss = loss_of(dict(enumerate([dead, *survivors])), 10.0)
    assert loss.whole_s is None
    assert loss.ms == pytest.approx(1e3 * (0.75 - 0.5))
