"""The benchmark of the input pipeline: jobs of two sizes, and their curves."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
from scripts import ROOT, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="there is no torchvision"
)
SCRIPT = ROOT / "benchmarks" / "input_pipeline.py"


@pytest.mark.slow
def test_from_jobs_to_curves(tmp_path: Path, monkeypatch, capsys):
    fast = ("--epoch-steps", "3", "--steps", "1", "--rounds", "1", "--workers", "0")
    small = ("--batch-size", "2", "--augment", "0", "--pretend-ms", "1", "--file", "out.jsonl")
    for size in (2, 1):
        outputs = run(SCRIPT, *fast, *small, folder=tmp_path, size=size)
        assert [output.code for output in outputs] == [None] * size
        assert outputs[0].output.startswith("input pipeline: 3 steps with real data on")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["ranks"] for row in rows] == [2, 1]
    for row in rows:
        assert row["gap"] == pytest.approx(1 - row["rates"]["real"] / row["rates"]["synthetic"])

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    arguments = ["--ranks", "--file", "out.jsonl"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert "# stand-in, 1 ms, 0 x RandAugment, batch 2 of 64 x 64" in printed
    lines = [line.split() for line in printed.splitlines() if line and line[0] == " "]
    assert lines[0][6] == "100.0%"  # synthetic data on the fewest ranks
    assert [line[0] for line in lines] == ["1", "2"]

    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--plot", "curves.png"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
