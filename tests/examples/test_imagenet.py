# SPDX-License-Identifier: Apache-2.0
"""The recipe for ImageNet, on a few made-up images."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
import signal
import sys
from pathlib import Path
from unittest import mock

import pool
import pytest
import torch
from scripts import DEADLINE_S, ROOT, Run, run, run_script
from torch.nn.functional import cross_entropy

from torch_ring import checkpoint
from torch_ring.metrics import Means

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="there is no torchvision"
)

IMAGENET = ROOT / "examples" / "imagenet"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 24 images to train on and 9 to test on, of three classes."""
    folder = tmp_path_factory.mktemp("images")
    counts = ("--classes", "3", "--train", "8", "--val", "3")
    run(IMAGENET / "make_images.py", str(folder), *counts, folder=folder, size=1)
    return folder


def epochs_in(output: str) -> list[str]:
    return re.findall(r"^epoch (\d+),", output, re.MULTILINE)


def evaluate(images: Path, state: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return loss and accuracy of a model on the test images, computed without torch_ring."""
    from torchvision import datasets, models, transforms

    model = models.resnet18(num_classes=3).eval()
    model.load_state_dict(state)
    prepare = transforms.Compose(
        [
            transforms.Resize(36),
            transforms.CenterCrop(32),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    pictures, labels = zip(*datasets.ImageFolder(images / "val", prepare), strict=True)
    with torch.no_grad():
        output = model(torch.stack(pictures))
    wanted = torch.tensor(labels)
    right = (output.argmax(1) == wanted).double().mean().item()
    return cross_entropy(output, wanted).item(), right


@pytest.mark.slow
def test_imagenet_trains_and_resumes(tmp_path: Path, images: Path) -> None:
    options = ("--data-dir", str(images), "--smoke", "--batch-size", "4", "--epochs", "2")
    more = ("--wire", "fp16", "--accumulate", "2", "--plot", "curve.png", "--tensorboard", "log")
    more = (*more, "--report-steps", "1")
    first, second = run(IMAGENET / "train.py", *options, *more, folder=tmp_path)
    assert "resnet18: size 2, 1 steps of 16 images an epoch" in first.output
    assert epochs_in(first.output) == ["1", "2"]
    assert second.output == ""
    assert "input pipeline: 2 steps with real data on 2 ranks" in first.output
    assert "too few steps to tell: 1 of each kind of data" in first.output
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "log").glob("events.*"))

    state = torch.load(tmp_path / "imagenet.pt")
    rows = state["history"]
    assert [row["lr"] for row in rows] == pytest.approx([4 * 0.003] * 2)  # ranks x passes
    # Nine images on two ranks: each is counted once, and both ranks have the same model.
    loss, right = evaluate(images, state["model"])
    assert rows[-1]["val_loss"] == pytest.approx(loss, rel=1e-3)
    assert rows[-1]["top1"] == pytest.approx(right)

    # The checkpoint of two ranks, on one.
    resumed = ("--resume", "--epochs", "3", "--data", "synthetic", "--report-steps", "0", "--amp")
    (alone,) = run(IMAGENET / "train.py", *options, *resumed, folder=tmp_path, size=1)
    assert epochs_in(alone.output) == ["3"]
    assert "6 steps with synthetic data" in alone.output
    rows = torch.load(tmp_path / "imagenet.pt")["history"]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[-1]["lr"] == pytest.approx(0.003)


def run_until_saved(script: str, arguments: list[str], folder: str, times: int) -> Run:
    """Run a script as `run_script` does, and end it after a number of saves."""
    saved = itertools.count(1)

    def save(*arguments: object) -> None:
        checkpoint_save(*arguments)
        if next(saved) == times:
            sys.exit("interrupted")

    checkpoint_save = checkpoint.save
    with mock.patch.object(checkpoint, "save", save):
        return run_script(script, arguments, folder)


def test_imagenet_goes_on_within_an_epoch(tmp_path: Path, images: Path) -> None:
    options = ["--data-dir", str(images), "--smoke", "--report-steps", "0", "--batch-size", "2"]
    options += ["--epochs", "2"]
    options += ["--model", "squeezenet1_1", "--image-size", "64", "--checkpoint-every", "2"]
    arguments = (str(IMAGENET / "train.py"), options, str(tmp_path), 2)
    first, _ = pool.run(
        run_until_saved, 2, args=arguments, transport="", deadline_s=DEADLINE_S, initialized=False
    )
    assert first.code == "interrupted"
    assert epochs_in(first.output) == []
    state = torch.load(tmp_path / "imagenet.pt")
    assert (state["sampler"]["epoch"], state["sampler"]["consumed"]) == (0, 4 * 2 * 2)

    (alone,) = run(IMAGENET / "train.py", *options, "--resume", folder=tmp_path, size=1)
    assert epochs_in(alone.output) == ["1", "2"]
    # In the first epoch, 8 of 24 images remained.
    assert "16 steps with real data on 1 rank" in alone.output
    assert torch.load(tmp_path / "imagenet.pt")["schedule"]["last_epoch"] == 24


def run_until_killed(script: str, arguments: list[str], folder: str, deaths: dict) -> Run:
    """Run a script as `run_script` does; kill the process when it computes the n-th loss.

    Args:
        deaths: n, by rank; or "means": when it computes the means of the first epoch.
    """
    losses, at = itertools.count(1), deaths.get(int(os.environ["RANK"]))

    def compute(*arguments: torch.Tensor) -> torch.Tensor:
        if next(losses) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return cross_entropy(*arguments)

    def means(own: Means) -> dict[str, float]:
        if at == "means":
            os.kill(os.getpid(), signal.SIGKILL)
        return compute_means(own)

    compute_means = Means.compute
    with (
        mock.patch.object(torch.nn.functional, "cross_entropy", compute),
        mock.patch.object(Means, "compute", means),
    ):
        return run_script(script, arguments, folder)


@pytest.mark.weekly
def test_imagenet_trains_on_when_ranks_die(tmp_path: Path, images: Path) -> None:
    """One of three ranks dies in the means of an epoch, then the first one in an accumulation."""
    deaths: dict[int, int | str] = {1: "means", 0: 8}
    options = ["--data-dir", str(images), "--smoke", "--elastic", "--batch-size", "2"]
    options += ["--accumulate", "2", "--plot", "curve.png"]
    results = pool.run(
        *(run_until_killed, 3),
        args=(str(IMAGENET / "train.py"), options, str(tmp_path), deaths),
        transport="",
        deadline_s=DEADLINE_S,
        initialized=False,
        may_die=list(deaths),
    )
    survivor, left = results[2], 1
    assert survivor.code is None
    first = survivor.output
    assert f"resnet18: size {left}, {24 // left // 4} steps of {4 * left} images an epoch" in first
    assert epochs_in(first)[-1] == "3"
    assert (tmp_path / "curve.png").exists()

    state = torch.load(tmp_path / "imagenet.pt")
    rows = state["history"]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[-1]["lr"] == pytest.approx(2 * left * 0.003)
    assert state["schedule"]["last_epoch"] == 3 * (24 // left // 4)  # three epochs, for these ranks
    assert state["sampler"]["epoch"] == 3
    assert not any(math.isnan(row.get("loss", 0.0)) for row in rows)
    assert sum("loss" not in row for row in rows) == 1
    loss, right = evaluate(images, state["model"])
    assert rows[-1]["val_loss"] == pytest.approx(loss, rel=1e-3)
    assert rows[-1]["top1"] == pytest.approx(right)


def test_imagenet_ends_on_all_ranks(tmp_path: Path, images: Path) -> None:
    torch.save({"model": {}, "history": []}, tmp_path / "other.pt")
    for options, problem in (
        (("--resume",), "cannot resume from imagenet.pt: cannot load the checkpoint"),
        (
            ("--resume", "--checkpoint", "other.pt"),
            "cannot resume from other.pt: it is of another program, not of examples/imagenet with "
            "resnet18 and 3 classes",
        ),
        (("--batch-size=13",), "24 images are less than a step of 2 x 13"),
    ):
        always = ("--data-dir", str(images), "--smoke")
        first, second = run(IMAGENET / "train.py", *always, *options, folder=tmp_path)
        assert str(first.code).startswith(problem)
        assert second.code == 1
