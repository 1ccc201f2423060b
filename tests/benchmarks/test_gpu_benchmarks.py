"""The benchmarks for GPUs run on the stand-ins, as far as these go, and count right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import device_double
import pytest
from launcher_commands import TORCHRUN, output_of, start_program
from scripts import ROOT

pytestmark = [pytest.mark.launcher, device_double.needed, pytest.mark.slow]

BENCHMARKS = ROOT / "benchmarks"


def report_of(command: list[str], report: Path) -> dict[str, Any]:
    output = output_of(start_program([*command, "--json", str(report)], PYTHONPATH=str(ROOT)))
    assert report.exists(), output
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_launches_are_counted_beside_those_of_ddp(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(BENCHMARKS / "launches.py")]
    command += ["--parameters", "50", "--steps", "2", "--rounds", "1"]
    report = report_of(command, tmp_path / "out.json")
    ddp, with_views, agreed, ahead = report["rows"]
    assert (ddp["kernels"], ddp["copies"], ddp["collectives"]) == (50, 50, 1)
    assert (with_views["kernels"], with_views["copies"]) == (50, 0)
    for ours in (agreed, ahead):  # One bucket: the copy in, the division.
        assert (ours["kernels"], ours["copies"], ours["collectives"]) == (2, 0, 1)
    assert [row["host_waits"] for row in report["rows"]] == [0, 0, 0, 0]
    assert [row["rank_waits"] for row in report["rows"]] == [0, 0, 1, 0]
    assert [row["variant"] for row in report["host"]] == ["torch", "agreed", "run ahead"]


def test_ranks_of_one_gpu_train_like_one_process(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "stand-in"]
    command += ["--no-checks", "--steps", "1", "--rounds", "1"]
    report = report_of(command, tmp_path / "out.json")
    assert {size: ranks["training"] for size, ranks in report["ranks"].items()} == {
        "2": ["passed"],
        "4": ["passed"],
    }
    assert [row["variant"] for row in report["ranks"]["2"]["rows"]] == ["torch", "torch_ring"]
    assert report["ranks"]["2"]["skipped"] != [None]
    assert report["rows"] == []
