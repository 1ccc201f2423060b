"""What a newcomer runs first: the MNIST example."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from scripts import ROOT, run

TRAIN = ROOT / "examples" / "mnist" / "train.py"
# Nobody listens there: no download succeeds, whatever network there is.
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def accuracy(output: str) -> float:
    """Return what the last line says."""
    match = re.fullmatch(r"test accuracy ([01]\.\d{4})", output.splitlines()[-1])
    assert match, output
    return float(match[1])


def test_mnist_trains_and_resumes(tmp_path: Path) -> None:
    options = ("--dataset", "digits", "--report-steps", "1")
    first, silent = run(TRAIN, *options, "--epochs", "1", folder=tmp_path)
    assert first.output.count("epoch 1:") == 1
    assert silent.output == ""
    assert accuracy(first.output) > 0.3  # ten classes: an untrained model has about 0.1

    # The checkpoint of two ranks, on three.
    arguments = ("--epochs", "2", "--resume", "--plot", "curve.png", "--tensorboard", "log")
    second, *others = run(TRAIN, *options, *arguments, folder=tmp_path, size=3)
    assert re.findall(r"epoch (\d):", second.output) == ["2"]
    assert accuracy(second.output) > accuracy(first.output)
    assert [other.output for other in others] == ["", ""]
    assert "input pipeline: 29 steps with real data on 3 ranks" in second.output
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "log").glob("events.*"))
    schedule = torch.load(tmp_path / "checkpoint.pt")["schedule"]
    assert schedule["last_epoch"] == 29 + 29  # the second is of 44 steps of two ranks


def members_accuracies(folder: Path) -> tuple[float, float]:
    """Return the mean accuracy of the members in a checkpoint, and that of their mean."""
    with mock.patch.object(sys, "path", [str(TRAIN.parent), *sys.path]):
        example = runpy.run_path(str(TRAIN))
    _, test_set = example["load_digits"]()
    images, labels = test_set.tensors
    votes = []
    for member in torch.load(folder / "checkpoint.pt")["members"]:
        model = example["make_model"](pixels=8).eval()
        model.load_state_dict(member["model"])
        with torch.no_grad():
            votes.append(model(images).softmax(1))
    right = [(vote.argmax(1) == labels).double().mean().item() for vote in [*votes, sum(votes)]]
    return sum(right[:-1]) / len(votes), right[-1]


def test_mnist_ensemble_votes_and_resumes(tmp_path: Path) -> None:
    options = ("--smoke", "--ensemble", "--data", "cached", "--report-steps", "0")
    first, second = run(TRAIN, *options, folder=tmp_path)
    members, together = members_accuracies(tmp_path)
    assert f"members' accuracy {members:.4f} on average\n" in first.output
    assert accuracy(first.output) == pytest.approx(together, abs=1e-4)
    assert members < together  # two models that differ, and few images: both err often, not alike
    assert second.output == ""

    first, _ = run(TRAIN, *options, "--resume", "--epochs", "2", folder=tmp_path)
    assert re.findall(r"epoch (\d):", first.output) == ["2"]
    assert f"members' accuracy {members_accuracies(tmp_path)[0]:.4f} on" in first.output
    (alone,) = run(TRAIN, *options, "--resume", folder=tmp_path, size=1)
    assert alone.code == "cannot resume from checkpoint.pt: it holds an ensemble of 2"


@pytest.mark.parametrize("contents", [None, b"no checkpoint"])
def test_mnist_cannot_resume(tmp_path: Path, contents: bytes | None) -> None:
    if contents is not None:
        (tmp_path / "checkpoint.pt").write_bytes(contents)
    first, second = run(TRAIN, "--dataset", "digits", "--resume", folder=tmp_path)
    assert str(first.code).startswith("cannot resume from checkpoint.pt: ")
    assert second.code == 1
    assert first.output == second.output == ""


def test_mnist_without_a_network_trains_on_digits(tmp_path: Path) -> None:
    options = ("--epochs", "1", "--report-steps", "0")
    (alone,) = run(TRAIN, *options, folder=tmp_path, size=1, env=NO_NETWORK)
    assert "MNIST cannot be had" in alone.output
    assert accuracy(alone.output) > 0.3
