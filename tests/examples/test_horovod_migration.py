"""The program for Horovod, and its counterpart for torch_ring."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pool
import pytest
from scripts import DEADLINE_S, ROOT, Run, run, run_script

from torch_ring.horovod import install

EXAMPLE = ROOT / "examples" / "horovod_migration"
MIGRATED = EXAMPLE / "train.py"
HOROVOD = EXAMPLE / "train_horovod.py"


def test_smoke(tmp_path: Path) -> None:
    (alone,) = run(MIGRATED, "--smoke", folder=tmp_path, size=1)
    assert alone.output.startswith("epoch 1: loss ")
    (tmp_path / "horovod_migration.pt").unlink()

    outputs = ("--plot", "picture.png", "--tensorboard", "events")
    first, second = run(MIGRATED, "--smoke", *outputs, folder=tmp_path)
    assert first.code is None
    assert second == Run(None, "")
    assert (tmp_path / "horovod_migration.pt").exists()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "events").rglob("*tfevents*"))


@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    run(MIGRATED, "--epochs", "2", folder=tmp_path)
    resumed = run(MIGRATED, "--epochs", "3", "--resume", folder=tmp_path, size=3)[0]
    assert re.findall(r"^epoch (\d):", resumed.output, re.MULTILINE) == ["3"]


def test_migration_changes_one_line() -> None:
    lines = [path.read_text().splitlines() for path in (HOROVOD, MIGRATED)]
    changes = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
    assert changes == ["- import horovod.torch as hvd", "+ import torch_ring as hvd"]


def run_as_horovod(arguments: list[str], folder: str) -> Run:
    """Run the program for Horovod with torch_ring under Horovod's name."""
    install()
    return run_script(str(HOROVOD), arguments, folder)


def test_program_for_horovod_prints_the_same(tmp_path: Path) -> None:
    arguments = ["--epochs", "2", "--fp16-allreduce", "--clip", "2"]
    migrated = run(MIGRATED, *arguments, folder=tmp_path)
    original = pool.run(
        run_as_horovod,
        2,
        args=(arguments, str(tmp_path)),
        transport="",
        deadline_s=DEADLINE_S,
        initialized=False,
    )
    assert original == migrated
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+),", migrated[0].output)]
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_program_for_horovod_takes_adasum(tmp_path: Path) -> None:
    first, second = run(MIGRATED, "--smoke", "--use-adasum", folder=tmp_path)
    (accuracy,) = re.findall(r"test accuracy (\S+)", first.output)
    assert float(accuracy) > 0.2  # ten classes
    assert second == Run(None, "")
