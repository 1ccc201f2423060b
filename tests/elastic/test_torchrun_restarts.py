# SPDX-License-Identifier: Apache-2.0
"""Under torchrun a death ends all ranks: the job goes on from its last checkpoint."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from launcher_commands import TORCHRUN, output_of, start_program
from restarted_program import DEATH, EVERY, STEPS


def weights() -> list[float]:
    """Return the weight after each step of an uninterrupted training."""
    weight = momentum = 0.0
    found = []
    for step in range(STEPS):
        momentum = 0.5 * momentum + step + 0.5  # the mean of the gradients of two ranks
        weight -= momentum
        found.append(weight)
    return found


@pytest.mark.weekly
@pytest.mark.launcher
def test_a_job_that_torchrun_starts_again_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("restarted_program.py"))
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    job = start_program(
        [*TORCHRUN, *options, program, str(tmp_path / "checkpoint.pt")],
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
    )
    output = output_of(job, jobs=2)  # it starts the ranks again
    assert job.returncode == 0, output
    said = re.findall(r"life (\d) rank (\d) step (\d+): (-?[\d.]+)", output)
    at_checkpoint = DEATH // EVERY * EVERY
    assert at_checkpoint > 0
    for rank in "01":
        of_rank = [(life, int(step), float(weight)) for life, r, step, weight in said if r == rank]
        first = [(step, weight) for life, step, weight in of_rank if life == "0"]
        second = [(step, weight) for life, step, weight in of_rank if life == "1"]
        undisturbed = list(enumerate(weights()))
        assert first == undisturbed[:DEATH]
        assert second == undisturbed[at_checkpoint:]
