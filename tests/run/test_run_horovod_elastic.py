"""A program for horovod.torch.elastic under the launcher, while a rank of it is killed."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest
from launched_jobs import LaunchedJob
from scripts import ROOT

EPOCHS = 40


@pytest.mark.slow
@pytest.mark.launcher
def test_a_program_for_horovods_elastic_goes_on_after_a_kill() -> None:
    program = str(ROOT / "tests/horovod/programs/elastic.py")
    arguments = [sys.executable, program, "--epochs", str(EPOCHS)]
    job = LaunchedJob("-np", "3", "--min-np", "2", *arguments)
    job.wait_for("is process", 3)
    job.wait_for("epoch 1 on 3 ranks, rate 0.03")
    pids = dict(re.findall(r"rank (\d) is process (\d+)", job.stdout))
    os.kill(int(pids["0"]), signal.SIGKILL)
    assert job.wait() == 0, job.stdout + job.stderr
    job.require_nothing_left()
    # The epoch of the death may be printed twice, or not at all, if rank 0 has died before.
    told = [int(epoch) for epoch in re.findall(r"epoch (\d+) on", job.stdout)]
    assert told == sorted(told)
    assert len(told) <= EPOCHS + 1
    assert len(set(told)) >= EPOCHS - 1
    assert f"epoch {EPOCHS - 1} on 2 ranks, rate 0.02" in job.stdout
    found = re.search(r"accuracy ([\d.]+) on 2 ranks", job.stdout)
    assert found, job.stdout
    assert float(found[1]) > 0.9
