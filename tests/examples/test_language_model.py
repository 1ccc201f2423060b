# SPDX-License-Identifier: Apache-2.0
"""The language model: one text, any number of ranks, one curve."""

from __future__ import annotations

import json
import math
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pool
import pytest
import torch
from launched_jobs import LaunchedJob
from scripts import ROOT, Run, run, run_script

import torch_ring as hvd

EXAMPLE = ROOT / "examples" / "language_model"
TRAIN = EXAMPLE / "train.py"
LOSSES = ("training loss", "validation loss")
SMOKE = ("--smoke", "--sample", "1", "--device", "cpu")
# With the windows of --smoke, epochs of 8 steps: 20 steps go through two and a half.
SHORT_TEXT = "".join(f"{n * n} is the square of {n}. " for n in range(140))[:3500]


def run_in_float64(arguments: list[str], folder: str, saves: int | None) -> Run:
    """Run the script, in float64, until a number of saves: then it exits, as if killed."""
    save, left = hvd.checkpoint.save, saves

    def save_and_leave(*args: Any, **kwargs: Any) -> None:
        nonlocal left
        save(*args, **kwargs)
        if left is not None:
            left -= 1
            if left == 0:
                raise SystemExit("killed")

    torch.set_default_dtype(torch.float64)
    hvd.checkpoint.save = save_and_leave
    try:
        return run_script(str(TRAIN), arguments, folder)
    finally:
        hvd.checkpoint.save = save
        torch.set_default_dtype(torch.float32)


def train(
    folder: Path, size: int, *arguments: str, saves: int | None = None, transport: str = ""
) -> dict[str, Any]:
    """Return the curves of a smoke run on the short text."""
    (folder / "text.txt").write_text(SHORT_TEXT)
    options = [*SMOKE, "--text", "text.txt", "--json", "log.json", *arguments]
    args = (options, str(folder), saves)
    ranks = pool.run(run_in_float64, size, args=args, transport=transport, initialized=False)
    first, *others = ranks
    assert [other.output for other in others] == [""] * (size - 1)
    if saves is not None:
        assert first.code == "killed"
        return {}
    curves = json.loads((folder / "log.json").read_text())
    assert curves.pop("ranks") == size
    return curves


def assert_close(curves: dict[str, Any], expected: dict[str, Any]) -> None:
    assert curves.keys() == expected.keys() == {*LOSSES, "gradient norm"}
    for name, points in expected.items():
        assert curves[name] == [[step, pytest.approx(value, rel=1e-9)] for step, value in points]


def test_any_number_of_ranks_draws_one_curve(tmp_path: Path) -> None:
    # Compare gradient norms, too: AdamW's steps do not show gradients twice as large.
    options = ("--steps", "12", "--log-every", "1")
    alone = train(tmp_path, 1, *options)
    assert [step for step, _ in alone["training loss"]] == list(range(1, 13))
    even_guess = math.log(len({*SHORT_TEXT}))
    assert alone["training loss"][0][1] == pytest.approx(even_guess, rel=0.05)
    assert all(alone[name][-1][1] < even_guess - 0.3 for name in LOSSES)
    for size, passes in ((1, 3), (2, 1), (3, 2)):
        assert_close(train(tmp_path, size, *options, "--accumulate", str(passes)), alone)


@pytest.mark.slow
def test_hosts_agree_once_in_some_steps(tmp_path: Path) -> None:
    """Over TCP each rank is a host of its own; on one host, every step has all gradients."""
    options = ("--steps", "20", "--checkpoint-every", "8")
    usual = train(tmp_path, 2, *options)
    apart = train(tmp_path, 2, *options, "--diloco", "4", transport="tcp")
    for name in LOSSES:
        # Each rank steps with its half of the batch: two steps in place of one, and a mean of them.
        assert apart[name][-1][1] < 1.1 * usual[name][-1][1]
    # One host has no other to agree with, but its outer optimizer steps, too.
    alone = train(tmp_path, 2, *options, "--diloco", "4", saves=1)
    assert alone == {}
    resumed = train(tmp_path, 2, *options, "--diloco", "4", "--resume")
    assert resumed["validation loss"][-1][1] < 1.1 * usual["validation loss"][-1][1]


@pytest.mark.slow
def test_resumes_where_it_was(tmp_path: Path) -> None:
    whole = train(tmp_path, 3)
    state = torch.load(tmp_path / "language_model.pt", weights_only=True)
    train(tmp_path, 3, saves=1)
    halfway = (tmp_path / "language_model.pt").read_bytes()
    assert torch.load(tmp_path / "language_model.pt", weights_only=True)["step"] == 10

    assert train(tmp_path, 3, "--resume") == whole  # bit for bit
    again = torch.load(tmp_path / "language_model.pt", weights_only=True)
    assert again.keys() == state.keys()
    for name in ("model", "optimizer"):
        torch.testing.assert_close(again[name], state[name], rtol=0, atol=0)
    for name in again.keys() - {"model", "optimizer"}:
        assert again[name] == state[name]

    (tmp_path / "language_model.pt").write_bytes(halfway)
    assert_close(train(tmp_path, 2, "--resume"), whole)


def stop_at(step: int, folder: Path, *options: str) -> int:
    """Send SIGUSR1 to the launcher at a step; return the step of the checkpoint."""
    endless = (*SMOKE, "--steps", "1000000", "--log-every", "1", "--checkpoint-every", "1000000")
    command = (sys.executable, "-u", str(TRAIN), *endless, *options)
    job = LaunchedJob("-np", "2", *command, folder=folder, PYTHONPATH=str(ROOT))
    job.wait_for(f"step {step}:")
    job.signal(signal.SIGUSR1)
    assert job.wait() == 128 + signal.SIGTERM
    return int(torch.load(folder / "language_model.pt", weights_only=True)["step"])


@pytest.mark.slow
@pytest.mark.launcher
def test_stops_at_one_step_when_a_scheduler_says_so(tmp_path: Path) -> None:
    first = stop_at(3, tmp_path)
    assert first >= 3
    assert stop_at(first + 2, tmp_path, "--resume") >= first + 2


@pytest.mark.slow
def test_16_bits_and_other_data(tmp_path: Path) -> None:
    options = (*SMOKE, "--amp", "float16", "--data", "cached", "--json", "log.json")
    first, _ = run(TRAIN, *options, "--report-steps", "0", folder=tmp_path)
    assert "20 steps with cached data on 2 rank" in first.output
    losses = [loss for _, loss in json.loads((tmp_path / "log.json").read_text())[LOSSES[0]]]
    assert losses[-1] < losses[0] - 0.3


def test_says_why_it_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(SHORT_TEXT)
    (tmp_path / "b.txt").write_text(SHORT_TEXT.upper())
    (tmp_path / "short.txt").write_text(SHORT_TEXT[:100])
    run(TRAIN, *SMOKE, "--text", "a.txt", "--steps", "1", folder=tmp_path, size=1)
    for arguments, problem in (
        (("--accumulate", "4"), "--batch-size 12 cannot be divided among 2 ranks x 4 passes"),
        (("--text", "c.txt"), "cannot read the text c.txt: "),
        (("--text", "short.txt"), "100 characters are too few for a batch of 12"),
        (("--resume", "--checkpoint", "b.pt"), "cannot load the checkpoint b.pt: "),
        (
            ("--resume", "--text", "b.txt"),
            "language_model.pt is of another program, of another model, or of ",
        ),
    ):
        first, second = run(TRAIN, *SMOKE, *arguments, folder=tmp_path)
        assert str(first.code).startswith(problem)
        assert (second.code, first.output, second.output) == (1, "", "")


def test_model_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = runpy.run_path(str(EXAMPLE / "model.py"))["GPT"](10, 8, 2, 2, 16)
    text = torch.randint(10, (3, 8))
    changed = text.clone()
    changed[:, 5] = (text[:, 5] + 1) % 10
    before, after = model(text), model(changed)
    assert before.shape == (3, 8, 10)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert (after[:, 5:] != before[:, 5:]).any(2).all()
    assert model.generate(text[0], 20).shape == (28,)
