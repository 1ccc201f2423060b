# SPDX-License-Identifier: Apache-2.0
"""The MNIST example, which a newcomer runs first: `make mnist`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from scripts import ROOT, run

EXAMPLE = ROOT / "examples" / "mnist"
TRAIN = EXAMPLE / "train.py"
# No server listens there: no download succeeds, on any network.
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def accuracy(output: str) -> float:
    """Return the accuracy in the last line."""
    match = re.fullmatch(r"test accuracy ([01]\.\d{4})", output.splitlines()[-1])
    assert match, output
    return float(match[1])


def test_trains_and_resumes(tmp_path: Path) -> None:
    first, silent = run(TRAIN, "--smoke", folder=tmp_path)
    assert first.output.startswith("digits: size 2, 44 steps an epoch, 16 images a step\n")
    assert re.findall(r"epoch (\d):", first.output) == ["1"]
    assert silent.output == ""
    assert accuracy(first.output) > 0.3  # ten classes: an untrained model has about 0.1

    # The checkpoint of two ranks, on three.
    options = ("--smoke", "--epochs", "2", "--resume")
    second, *others = run(TRAIN, *options, folder=tmp_path, size=3)
    assert re.findall(r"epoch (\d):", second.output) == ["2"]
    assert accuracy(second.output) > accuracy(first.output)
    assert [other.output for other in others] == ["", ""]
    state = torch.load(tmp_path / "mnist.pt")
    assert state["schedule"]["last_epoch"] == 29 + 29  # in steps of three ranks; 44 were of two
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(3 * 0.001)
    assert [row["accuracy"] for row in state["history"]] == [
        pytest.approx(accuracy(run.output), abs=1e-4) for run in (first, second)
    ]

    # Three ranks have counted each image of the test set once.
    model = runpy.run_path(str(EXAMPLE / "model.py"))["make_model"](pixels=8).eval()
    model.load_state_dict(state["model"])
    images, labels = runpy.run_path(str(EXAMPLE / "digits.py"))["load_scikit_learn"]().test.tensors
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).double().mean().item()
    assert accuracy(second.output) == pytest.approx(right, abs=1e-4)


def test_without_a_network_trains_on_digits(tmp_path: Path) -> None:
    (alone,) = run(TRAIN, "--epochs", "1", folder=tmp_path, size=1, env=NO_NETWORK)
    assert "MNIST cannot be had" in alone.output
    assert accuracy(alone.output) > 0.3


def test_counts_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_args = runpy.run_path(str(EXAMPLE / "options.py"))["parse_args"]
    for option in ("--epochs", "--batch-size"):
        for value in ("-1", "0", "two"):
            monkeypatch.setattr("sys.argv", ["train.py", f"{option}={value}"])
            with pytest.raises(SystemExit, match=r"^2$"):
                parse_args()
            problem = f"argument {option}: '{value}' must be a whole number, 1 or more"
            assert problem in capsys.readouterr().err
