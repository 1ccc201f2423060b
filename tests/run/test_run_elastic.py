"""Jobs of the launcher that go on when ranks have failed."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pool
import pytest
import scripts
from launched_jobs import LaunchedJob
from scripts import ROOT

pytestmark = pytest.mark.launcher


def said(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("torch_ring.run: ")]


WHEN_TOLD = "until [ -e go ]; do sleep 0.05; done"


def test_the_others_go_on(tmp_path: Path):
    script = f"if [ $RANK = 1 ]; then exit 3; fi; {WHEN_TOLD}; echo $TORCH_RING_MIN_RANKS"
    job = LaunchedJob("-np", "3", "--min-np", "2", "sh", "-c", script, folder=tmp_path)
    job.wait_for_error("the other 2 go on")
    (tmp_path / "go").touch()
    assert job.wait() == 0
    job.require_nothing_left()
    assert sorted(job.stdout.splitlines()) == ["[0]<stdout>:2", "[2]<stdout>:2"]
    assert said(job.stderr) == [
        "torch_ring.run: rank 1 on localhost failed with exit code 3: the other 2 go on"
    ]


def test_too_few_are_ended(tmp_path: Path):
    script = (
        f"if [ $RANK = 0 ]; then exec sleep 1000; fi; if [ $RANK = 2 ]; then {WHEN_TOLD}; fi; "
        "exit $RANK"
    )
    job = LaunchedJob("-np", "3", "--min-np", "2", "sh", "-c", script, folder=tmp_path)
    job.wait_for_error("the other 2 go on")
    (tmp_path / "go").touch()
    assert job.wait() == 2
    job.require_nothing_left()
    assert said(job.stderr) == [
        "torch_ring.run: rank 1 on localhost failed with exit code 1: the other 2 go on",
        "torch_ring.run: rank 2 on localhost failed with exit code 2: the other ranks are ended",
    ]


def end_of(output: str, ranks: int) -> float:
    """Return the accuracy or the loss in the last line."""
    found = re.search(rf"{ranks} ranks have ended; \w+ ([\d.]+)", output)
    assert found, output
    return float(found[1])


def undisturbed(script: str, folder: Path, *options: str) -> float:
    """Return the result of a single rank that takes the batches of all."""
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


def train_until_a_rank_dies(script: str, epochs: int, folder: str, step: int) -> scripts.Run:
    """Run an example as `scripts.run_script` does; rank 1 is killed at the end of a step."""
    pause, steps = 0.001, itertools.count(1)

    def sleep(seconds: float) -> None:
        if seconds == pause and os.environ["RANK"] == "1" and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        real_sleep(seconds)

    real_sleep = time.sleep
    with mock.patch.object(time, "sleep", sleep):
        arguments = ["--pause", str(pause), "--epochs", str(epochs)]
        return scripts.run_script(str(ROOT / script), arguments, folder)


def outlived(script: str, epochs: int, folder: Path, size: int, step: int) -> str:
    """Return rank 0's output of an example that has lost rank 1, in processes of the pool."""
    first, *_ = pool.run(
        train_until_a_rank_dies,
        size,
        args=(script, epochs, str(folder), step),
        transport="",
        initialized=False,
        may_die=[1],
    )
    assert first.code is None
    return first.output


@pytest.mark.slow
def test_fewer_ranks_take_more_passes_and_end_with_the_same_loss(tmp_path: Path):
    pytest.importorskip("sklearn")
    script = "examples/elastic/accumulation.py"
    output = outlived(script, 5, tmp_path, size=2, step=30)
    assert "on 2 ranks: 2 passes" in output
    assert "on 1 ranks: 4 passes" in output
    alone = undisturbed(script, tmp_path, "--epochs", "5")
    assert end_of(output, 1) == pytest.approx(alone, abs=0.0002)


@pytest.mark.slow
def test_the_rate_follows_the_number_of_ranks(tmp_path: Path):
    pytest.importorskip("sklearn")
    output = outlived("examples/elastic/scaled_rate.py", 6, tmp_path, size=3, step=40)
    assert "on 3 ranks: rate 0.075" in output
    assert "on 2 ranks: rate 0.05" in output
    assert end_of(output, 2) > 0.85
