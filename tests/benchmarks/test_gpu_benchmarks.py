"""The benchmarks for GPUs run on the stand-ins as far as possible, and count correctly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import device_double
import pytest
from launcher_commands import output_of, start_program
from scripts import ROOT

pytestmark = [pytest.mark.launcher, device_double.needed, pytest.mark.slow]

BENCHMARKS = ROOT / "benchmarks"


def report_of(command: list[str], report: Path) -> dict[str, Any]:
    output = output_of(start_program([*command, "--json", str(report)], PYTHONPATH=str(ROOT)))
    assert report.exists(), output
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_ranks_of_one_gpu_train_like_one_process(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "stand-in"]
    command += ["--no-checks", "--steps", "1", "--rounds", "1"]
    report = report_of(command, tmp_path / "out.json")
    assert {size: ranks["training"] for size, ranks in report["ranks"].items()} == {
        "2": ["passed"],
        "4": ["passed"],
    }
    variants = [row["variant"] for row in report["ranks"]["2"]["rows"]]
    assert variants == ["torch", "torch_ring", "run_ahead"]  # DDP needs NCCL
    assert report["ranks"]["2"]["skipped"] != [None]
    assert report["rows"] == []
