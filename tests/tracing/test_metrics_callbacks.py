"""The callbacks for TensorBoard and Weights & Biases from docs/tracing.md."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import run
from scripts import ROOT

import torch_ring as hvd


def class_of(name: str) -> Any:
    """Return a class of the page."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tracing.md").read_text(), re.S)
    (code,) = [block for block in blocks if f"class {name}" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    return names[name]


def call_three_times(callback: Any) -> None:
    for step in range(3):
        hvd.allreduce(torch.ones(1000), name="a")
        callback(step)


def write_for_tensorboard(folder: str) -> None:
    callback = class_of("TensorBoardCallback")(f"{folder}/rank{hvd.rank()}")
    call_three_times(callback)
    callback.writer.close()


def test_tensorboard(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(write_for_tensorboard, 2, args=(str(tmp_path),))
    for rank in range(2):
        found = events.EventAccumulator(str(tmp_path / f"rank{rank}"))
        found.Reload()
        assert "torch_ring/arrival_lag_s" in found.Tags()["scalars"]
        sent = found.Scalars("torch_ring/allreduce/bytes")
        assert [(each.step, each.value) for each in sent] == [(0, 4000), (1, 8000), (2, 12_000)]
        assert found.Scalars("torch_ring/allreduce/waiting_s")[-1].value > 0


class StandInRun:
    """Accepts the calls of a wandb run."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))


def log_to_a_stand_in() -> None:
    before = sys.modules.get("wandb")
    sys.modules["wandb"] = types.SimpleNamespace(init=StandInRun)  # type: ignore[assignment]
    try:
        callback = class_of("WandbCallback")(project="p")
    finally:
        del sys.modules["wandb"]
        if before is not None:
            sys.modules["wandb"] = before
    call_three_times(callback)
    assert callback.run.options == {"project": "p"}
    assert [step for step, _ in callback.run.logged] == [0, 1, 2]
    sent = [values["torch_ring/allreduce/bytes"] for _, values in callback.run.logged]
    assert sent == [4000, 8000, 12_000]
    assert all(values["torch_ring/allreduce/waiting_s"] > 0 for _, values in callback.run.logged)


def test_wandb_stand_in() -> None:
    run(log_to_a_stand_in, 2)


def log_offline(folder: str) -> None:
    callback = class_of("WandbCallback")(mode="offline", dir=folder, project="p")
    call_three_times(callback)
    callback(3)  # wandb considers a step complete when the next one begins
    assert callback.run.summary["_step"] == 2
    assert callback.run.summary["torch_ring/allreduce/bytes"] == 12_000
    callback.run.finish()


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    run(log_offline, 1, args=(str(tmp_path),))
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1
