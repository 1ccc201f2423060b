"""The common parts of all examples: names of checkpoints, refused checkpoints, Ctrl-C, plots."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from scripts import ROOT, run
from slow import slow_after

EXAMPLES = ROOT / "examples"
DEADLINE_S = 120
OPTIONS = {
    "function_approximation": (),
    "horovod_migration": (),
    "language_model": ("--smoke",),
    "mnist": ("--dataset", "digits"),
    "pinn": (),
}
SIGINT_ENDS_IT = "    signal.signal(signal.SIGINT, signal.SIG_DFL)"


def test_each_example_has_a_checkpoint_of_its_own() -> None:
    for name in (*OPTIONS, "imagenet"):
        files = [path.read_text() for path in (EXAMPLES / name).glob("*.py")]
        names = {pt for text in files for pt in re.findall(r'"([\w-]+\.pt)"', text)}
        assert names == {f"{name}.pt"}


@pytest.mark.parametrize("name", slow_after(2, OPTIONS))
def test_a_checkpoint_of_another_program_is_refused(name: str, tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(2)}, "history": []}
    torch.save(state, tmp_path / "other.pt")
    torch.save(state | {"program": "a program of mine"}, tmp_path / "mine.pt")
    for file in ("other.pt", "mine.pt"):
        options = (*OPTIONS[name], "--resume", "--checkpoint", file)
        first, second = run(EXAMPLES / name / "train.py", *options, folder=tmp_path)
        assert re.search(rf"{file}.* is of (another program|a program of mine)", str(first.code))
        assert "\n" not in str(first.code)
        assert second.code == 1


@pytest.mark.parametrize("name", slow_after(2, OPTIONS))
def test_a_damaged_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    """An incomplete copy is refused."""
    (tmp_path / "empty.pt").touch()
    options = (*OPTIONS[name], "--resume", "--checkpoint", "empty.pt")
    first, second = run(EXAMPLES / name / "train.py", *options, folder=tmp_path)
    assert re.match(r"cannot .*empty\.pt", str(first.code)), first.code
    assert second.code == 1


def test_a_checkpoint_of_other_options_is_refused(tmp_path: Path) -> None:
    script = EXAMPLES / "function_approximation" / "train.py"
    run(script, "--smoke", folder=tmp_path, size=1)
    (alone,) = run(script, "--smoke", "--resume", "--width", "8", folder=tmp_path, size=1)
    assert alone.code == (
        "cannot resume: function_approximation.pt is of examples/function_approximation with 2 "
        "layers of 16, not of examples/function_approximation with 2 layers of 8"
    )


# --- Ctrl-C


def test_ctrl_c_ends_every_example() -> None:
    for script in EXAMPLES.glob("*/*.py"):
        text = script.read_text()
        if "hvd.init()" in text and script.parent.name != "minimal":
            assert text.index(SIGINT_ENDS_IT) < text.index("    hvd.init()"), script


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "pinn"])
def test_ctrl_c_prints_no_traceback(name: str, tmp_path: Path) -> None:
    """The terminal sends SIGINT to all ranks at once."""
    script = str(EXAMPLES / name / "train.py")
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(2):
        group = ranks[0].pid if ranks else 0
        process = subprocess.Popen(
            [sys.executable, "-u", script, *OPTIONS[name]],
            cwd=tmp_path,
            preexec_fn=lambda group=group: os.setpgid(0, group),
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            | {"LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ranks.append(process)
    late = threading.Timer(DEADLINE_S, os.killpg, (ranks[0].pid, signal.SIGKILL))
    late.start()
    try:
        lines = iter(ranks[0].stdout.readline, "")  # type: ignore[union-attr]
        assert any(re.match("epoch 1|iteration 40:", line) for line in lines)
        os.killpg(ranks[0].pid, signal.SIGINT)
        outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        late.cancel()
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [-signal.SIGINT] * 2
    assert outputs[1] == ""
    assert "Traceback" not in outputs[0]


# --- plots


def draw_migration(folder: Path, epochs: int) -> None:
    module = runpy.run_path(str(EXAMPLES / "horovod_migration" / "train.py"))
    module["plot"](str(folder / "a.png"), [(1.0 / n, 1.0 / n, 0.5) for n in range(1, epochs + 1)])


def draw_imagenet(folder: Path, epochs: int) -> None:
    pytest.importorskip("torchvision")
    module = runpy.run_path(str(EXAMPLES / "imagenet" / "train.py"))
    names = ("loss", "val_loss", "accuracy", "top1", "images/s")
    rows = [{"epoch": n, **dict.fromkeys(names, 1.0 / n)} for n in range(1, epochs + 1)]
    module["draw"](rows, folder / "a.png")


@pytest.mark.slow
@pytest.mark.parametrize("draw", [draw_migration, draw_imagenet])
@pytest.mark.parametrize("epochs", [2, 5])
def test_epochs_are_on_whole_ticks(draw: Any, epochs: int, tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn = []
    with mock.patch.object(figures.Figure, "savefig", lambda self, *_, **__: drawn.append(self)):
        draw(tmp_path, epochs)
    ticks = [tick for axes in drawn[0].axes for tick in axes.get_xticks()]
    assert ticks
    assert all(tick == round(tick) for tick in ticks), ticks
