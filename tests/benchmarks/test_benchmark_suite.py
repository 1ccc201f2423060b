"""The benchmark suite: its commands, its targets and its plots."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import suite
import targets

RESULTS = suite.ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("name", suite.BENCHMARKS)
def test_commands_of_the_suite_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(suite.ROOT)
    benchmark = suite.BENCHMARKS[name]
    command = benchmark.command(name)
    assert Path(command[command.index("--json") - 1]).exists()
    parse_args = importlib.import_module(Path(benchmark.program).stem).parse_args
    monkeypatch.setattr(sys, "argv", command[command.index("--json") - 1 :])
    args = parse_args()
    assert args.json == Path("benchmarks", "results", f"{name}.json")
    if benchmark.program == "hosts.py":
        program = importlib.import_module(Path(args.program).stem)
        monkeypatch.setattr(sys, "argv", [args.program, *args.arguments])
        program.parse_args()


def test_open_mpi_is_a_peer_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "/opt/mpirun")
    command = suite.BENCHMARKS["allreduce"].command("allreduce")
    assert command[0] == "/opt/mpirun"
    assert command[command.index("--peers") + 1 :][:2] == ["mpi", "gloo"]
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    command = suite.BENCHMARKS["allreduce"].command("allreduce")
    assert "torch.distributed.run" in command
    assert "mpi" not in command


def test_targets_of_the_stored_results() -> None:
    """Any part of the results yields the targets that depend on that part alone."""
    reports = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    found = list(targets.targets(reports))
    assert len(list(targets.table(found))) > len(found) > 50
    for name, report in reports.items():
        alone = list(targets.targets({name: report}))
        assert {(target.what, target.peer) for target in alone} <= {(t.what, t.peer) for t in found}
    assert list(targets.targets({})) == []


@pytest.mark.slow
def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = importlib.import_module("plots")
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    files = plots.draw_all(tmp_path)
    assert {file.stem for file in files} == {path.stem for path in RESULTS.glob("*.png")} - {
        "input_pipeline"
    }
    for file in files:
        assert file.read_bytes()[:4] == b"\x89PNG"
        assert 1000 < file.stat().st_size < 60_000
