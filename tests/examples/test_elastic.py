# SPDX-License-Identifier: Apache-2.0
"""The elastic examples outlive rank 1, which dies in training."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pool
import pytest
import scripts
from scripts import ROOT

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="sklearn is not installed")
FOLDER = ROOT / "examples" / "elastic"


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
        return scripts.run_script(str(FOLDER / script), arguments, folder)


def end_of(output: str, ranks: int) -> float:
    """Return the accuracy or the loss in the last line."""
    found = re.search(rf"{ranks} ranks have ended; \w+ ([\d.]+)", output)
    assert found, output
    return float(found[1])


SCALED = ["on 3 ranks: rate 0.075", "on 2 ranks: rate 0.05"]


@pytest.mark.parametrize(
    ("script", "epochs", "size", "step", "lines", "error"),
    [
        pytest.param(
            *("train.py", 6, 3, 30, ["epoch 0 on 3 ranks", "on 2 ranks"], 0.02),
            marks=pytest.mark.weekly,
        ),
        # The batches are the same:
        pytest.param(
            *("accumulation.py", 5, 2, 30, ["2 ranks: 2 passes", "1 ranks: 4 passes"], 0.0002),
            marks=pytest.mark.slow,
        ),
        pytest.param("scaled_rate.py", 6, 3, 40, SCALED, 0.1, marks=pytest.mark.weekly),
    ],
)
def test_an_example_ends_as_on_one_rank(
    tmp_path: Path, script: str, epochs: int, size: int, step: int, lines: list[str], error: float
) -> None:
    first, *_ = pool.run(
        train_until_a_rank_dies,
        size,
        args=(script, epochs, str(tmp_path), step),
        transport="",
        initialized=False,
        may_die=[1],
    )
    assert first.code is None
    assert all(line in first.output for line in lines), first.output
    options = ("--epochs", str(epochs))
    (alone,) = scripts.run(FOLDER / script, *options, folder=tmp_path, size=1)
    end = end_of(first.output, size - 1)
    assert end == pytest.approx(end_of(alone.output, 1), abs=error)
    assert end > (0 if script == "accumulation.py" else 0.85)  # a loss, or an accuracy
