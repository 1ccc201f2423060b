"""The synthetic benchmark: Horovod's lines, and DDP beside it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from scripts import ROOT, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="there is no torchvision"
)

BENCHMARK = ROOT / "examples" / "synthetic_benchmark" / "benchmark.py"
# Horovod's lines, which its users' scripts look for.
ITERATION = r"Iter #\d+: \d+\.\d img/sec per CPU"
PER_DEVICE = r"Img/sec per CPU: (\d+\.\d) \+-\d+\.\d"
IN_ALL = r"Total img/sec on {size} CPU\(s\): (\d+\.\d) \+-\d+\.\d"


@pytest.mark.parametrize("size", [1, 2])
def test_benchmark_prints_what_horovods_does(tmp_path: Path, size: int) -> None:
    options = ("--smoke", "--fp16-allreduce", "--json", "out.json")
    first, *others = run(BENCHMARK, *options, folder=tmp_path, size=size)
    head, lines = first.output.splitlines()[:5], first.output.splitlines()[5:]
    assert head[:3] == ["Model: resnet18", "Batch size: 2", f"Number of CPUs: {size}"]
    assert head[3:] == ["Running warmup...", "Running benchmark..."]
    expected = [ITERATION, ITERATION, PER_DEVICE, IN_ALL.format(size=size)]
    assert len(lines) == len(expected)
    assert all(map(re.fullmatch, expected, lines)), lines
    assert [other.output for other in others] == [""] * (size - 1)

    report = json.loads((tmp_path / "out.json").read_text())
    result = report["results"]["torch_ring"]
    assert report["size"] == size
    assert list(report["results"]) == ["torch_ring"]
    assert len(result["img_secs"]) == 2
    assert result["img_sec_per_device"] == pytest.approx(sum(result["img_secs"]) / 2)
    assert result["img_sec_total"] == pytest.approx(size * result["img_sec_per_device"])


@pytest.mark.slow
def test_benchmark_compares_with_ddp(tmp_path: Path) -> None:
    options = ("--smoke", "--compare", "ddp", "--json", "out.json")
    output = run(BENCHMARK, *options, folder=tmp_path)[0].output
    turns = re.findall(r"^Iter #(\d)(?: \((DDP)\))?:", output, re.MULTILINE)
    assert turns == [("0", ""), ("0", "DDP"), ("1", "DDP"), ("1", "")], output
    report = json.loads((tmp_path / "out.json").read_text())
    ring, ddp = (report["results"][library] for library in ("torch_ring", "DDP"))
    assert report["ratio"] == pytest.approx(ring["img_sec_median"] / ddp["img_sec_median"])
    assert f"--- torch_ring / DDP: {report['ratio']:.3f} (of the medians)\n" in output


def test_benchmark_refuses_a_model_that_is_not_there(tmp_path: Path) -> None:
    first, second = run(BENCHMARK, "--model", "resnet19", folder=tmp_path)
    assert (first.code, second.code) == (2, 2)
