"""What a newcomer runs first: the example, the script of README.md, the benchmark."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from torch_ring.config import SETTINGS, Setting

pytestmark = pytest.mark.launcher

ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "examples" / "mnist" / "train.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DEADLINE_S = 150
# Discards what is sent to it: no download succeeds, whatever network there is.
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


@dataclass
class Run:
    code: int
    output: str
    errors: str


def python(*arguments: str | Path, cwd: Path, **environment: str) -> Run:
    """Run Python until it ends; nobody is left behind if it does not."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks
        output, errors = process.communicate(timeout=60)
        pytest.fail(f"still running after {DEADLINE_S} s:\n{output}\n{errors}")
    return Run(process.returncode, output, errors)


def accuracy(run: Run) -> float:
    """Return what the last line says."""
    assert run.code == 0, run.output + run.errors
    match = re.fullmatch(r"test accuracy (0\.\d{4})", run.output.splitlines()[-1])
    assert match, run.output
    return float(match[1])


def test_mnist_example_trains_and_resumes(tmp_path: Path) -> None:
    command = [*TORCHRUN, TRAIN, "--dataset", "digits"]
    first = python(*command, "--epochs", "1", cwd=tmp_path)
    # Ten classes: an untrained model has about 0.1.
    assert accuracy(first) > 0.5
    assert first.output.count("epoch 1:") == 1, "every rank prints"

    second = python(*command, "--epochs", "4", "--resume", cwd=tmp_path)
    assert accuracy(second) > accuracy(first)
    assert re.findall(r"epoch (\d):", second.output) == ["2", "3", "4"]


def test_mnist_example_resumes_from_nothing(tmp_path: Path) -> None:
    run = python(*TORCHRUN, TRAIN, "--dataset", "digits", "--resume", cwd=tmp_path)
    assert run.code != 0
    assert run.errors.count("cannot resume from checkpoint.pt") == 1
    assert "Traceback" not in run.errors.split("torch.distributed.elastic")[0]


def test_mnist_example_runs_alone_and_without_a_network(tmp_path: Path) -> None:
    run = python(TRAIN, "--epochs", "2", cwd=tmp_path, **NO_NETWORK)
    assert "MNIST cannot be had" in run.output
    assert accuracy(run) > 0.5


def test_readme_diff_makes_a_script_parallel(tmp_path: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = diff.splitlines()[2:]  # after the names of the files
    lines = [line for line in lines if not line.startswith("@@")]
    for name, sign in (("before.py", "-"), ("after.py", "+")):
        kept = [line[1:] for line in lines if line[:1] in (" ", sign, "")]
        (tmp_path / name).write_text("\n".join(kept) + "\n")

    losses = []
    for run in (python("before.py", cwd=tmp_path), python(*TORCHRUN, "after.py", cwd=tmp_path)):
        assert run.code == 0, run.output + run.errors
        losses.append([float(loss) for loss in re.findall(r"loss (\S+)", run.output)])
    alone, together = losses
    assert len(together) == len(alone)  # only one rank prints
    assert together[-1] < together[0]


@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "allgather"])
def test_benchmark_checks_what_it_times(tmp_path: Path, collective: str) -> None:
    run = python(
        *TORCHRUN,
        ROOT / "benchmarks" / "collectives.py",
        *("--collective", collective, "--max-bytes", "4096", "--rounds", "1", "--shared"),
        *("--json", "out.json"),
        cwd=tmp_path,
    )
    assert run.code == 0, run.output + run.errors
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["bytes"], row["memory"]) for row in rows] == [
        (size, memory) for size in (1024, 4096) for memory in ("private", "shared")
    ]
    for row in rows:
        assert {name: result["wrong"] for name, result in row["results"].items()} == {
            "torch_ring": 0,
            "gloo": 0,
        }


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.variable)
def test_readme_has_every_setting(setting: Setting) -> None:
    rows = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith(f"| `{setting.variable}`")
    ]
    assert len(rows) == 1
    assert setting.meaning in rows[0]
    assert all(f"`{alias}`" in rows[0] for alias, _ in setting.aliases)
