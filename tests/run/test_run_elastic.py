"""Jobs of the launcher that go on when ranks have failed."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import scripts
from launched_jobs import LaunchedJob, run_job
from scripts import ROOT

pytestmark = pytest.mark.launcher


def said(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("torch_ring.run: ")]


def test_the_others_go_on():
    script = "if [ $RANK = 1 ]; then exit 3; fi; sleep 1; echo $TORCH_RING_MIN_RANKS"
    code, out, errors = run_job("-np", "3", "--min-np", "2", "sh", "-c", script)
    assert code == 0
    assert sorted(out.splitlines()) == ["[0]<stdout>:2", "[2]<stdout>:2"]
    assert said(errors) == [
        "torch_ring.run: rank 1 on localhost failed with exit code 3: the other 2 go on"
    ]


def test_too_few_are_ended():
    script = "if [ $RANK != 0 ]; then sleep $RANK; exit $RANK; fi; exec sleep 1000"
    code, _, errors = run_job("-np", "3", "--min-np", "2", "sh", "-c", script)
    assert code == 2
    assert said(errors) == [
        "torch_ring.run: rank 1 on localhost failed with exit code 1: the other 2 go on",
        "torch_ring.run: rank 2 on localhost failed with exit code 2: the other ranks are ended",
    ]


def end_of(output: str, ranks: int) -> float:
    """Return the accuracy, or the loss, that the last line tells."""
    found = re.search(rf"{ranks} ranks have ended; \w+ ([\d.]+)", output)
    assert found, output
    return float(found[1])


def undisturbed(script: str, folder: Path, *options: str) -> float:
    """Return how well one rank does that takes the batches of all."""
    (alone,) = scripts.run(ROOT / script, *options, folder=folder, size=1)
    assert alone.code is None
    return end_of(alone.output, 1)


@pytest.mark.slow
def test_the_example_survives_the_death_of_rank_0(tmp_path: Path):
    pytest.importorskip("sklearn")
    script = "examples/elastic/train.py"
    program = [sys.executable, str(ROOT / script), "--pause", "0.05", "--epochs", "6"]
    job = LaunchedJob("-np", "3", "--min-np", "1", *program)
    job.wait_for("is process", 3)
    job.wait_for("epoch 1 on 3 ranks")
    pids = dict(re.findall(r"rank (\d) is process (\d+)", job.stdout))
    os.kill(int(pids["0"]), signal.SIGKILL)
    job.wait_for("on 2 ranks")
    os.kill(int(pids["2"]), signal.SIGKILL)
    assert job.wait() == 0, job.stderr
    job.require_nothing_left()
    alone = undisturbed(script, tmp_path, "--epochs", "6")
    assert alone > 0.85
    # Three ranks take 63 samples in a step, so the batches are not quite the same.
    assert end_of(job.stdout, 1) == pytest.approx(alone, abs=0.02)


@pytest.mark.slow
def test_fewer_ranks_take_more_passes_and_end_with_the_same_loss(tmp_path: Path):
    pytest.importorskip("sklearn")
    script = "examples/elastic/accumulation.py"
    program = [sys.executable, str(ROOT / script), "--pause", "0.05", "--epochs", "5"]
    job = LaunchedJob("-np", "2", "--min-np", "1", *program)
    job.wait_for("is process", 2)
    job.wait_for("on 2 ranks: 2 passes")
    pids = dict(re.findall(r"rank (\d) is process (\d+)", job.stdout))
    os.kill(int(pids["1"]), signal.SIGKILL)
    assert job.wait() == 0, job.stderr
    job.require_nothing_left()
    assert "on 1 ranks: 4 passes" in job.stdout
    alone = undisturbed(script, tmp_path, "--epochs", "5")
    assert end_of(job.stdout, 1) == pytest.approx(alone, abs=0.0002)


@pytest.mark.slow
def test_the_rate_follows_the_number_of_ranks():
    pytest.importorskip("sklearn")
    program = [sys.executable, str(ROOT / "examples/elastic/scaled_rate.py"), "--pause", "0.02"]
    job = LaunchedJob("-np", "3", "--min-np", "1", *program, "--epochs", "6")
    job.wait_for("is process", 3)
    job.wait_for("on 3 ranks: rate 0.075")
    pids = dict(re.findall(r"rank (\d) is process (\d+)", job.stdout))
    os.kill(int(pids["1"]), signal.SIGKILL)
    assert job.wait() == 0, job.stderr
    job.require_nothing_left()
    assert "on 2 ranks: rate 0.05" in job.stdout
    assert end_of(job.stdout, 2) > 0.85
