"""What a newcomer runs first: the example, the script of README.md, the benchmark."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pool
import pytest

from torch_ring.config import SETTINGS, Setting

ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "examples" / "mnist" / "train.py"
DEADLINE_S = 150  # a hang, not a slow machine
# Nobody listens there: no download succeeds, whatever network there is.
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


@dataclass(frozen=True)
class Run:
    """How a script ended on one rank: what it gave to sys.exit, what it printed."""

    code: str | int | None
    output: str


def run_script(script: str, arguments: list[str], folder: str) -> Run:
    """Do in this process what ``cd folder; python script arguments`` does."""
    os.chdir(folder)
    sys.argv = [script, *arguments]
    beside = str(Path(script).parent)
    sys.path.insert(0, beside)
    code = None
    # Tests run side by side: one thread a rank, whatever the script makes of the host's cores.
    one_thread = mock.patch("torch.set_num_threads")
    with one_thread, contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as exit_:
            code = exit_.code
        finally:  # another script may have modules of the same names
            sys.path.remove(beside)
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(f"{beside}{os.sep}"):
                    del sys.modules[name]
    return Run(code, output.getvalue())


def run(
    script: Path, *arguments: str, folder: Path, size: int = 2, env: dict[str, str] | None = None
) -> list[Run]:
    """Run a script on `size` ranks; return how it went, by rank."""
    return pool.run(
        run_script,
        size,
        args=(str(script), list(arguments), str(folder)),
        transport="",
        env=env,
        deadline_s=DEADLINE_S,
        initialized=False,
    )


def accuracy(output: str) -> float:
    """Return what the last line says."""
    match = re.fullmatch(r"test accuracy ([01]\.\d{4})", output.splitlines()[-1])
    assert match, output
    return float(match[1])


def torchrun(script: Path, *arguments: str, folder: Path) -> str:
    """Run a script on 2 ranks and return what they printed. Nobody is left behind."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, *launch, str(script), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun ends its ranks
        output, errors = process.communicate(timeout=60)
        pytest.fail(f"still running after {DEADLINE_S} s:\n{output}\n{errors}")
    assert process.returncode == 0, output + errors
    return output


@pytest.mark.launcher
def test_mnist_trains_and_resumes(tmp_path: Path) -> None:
    first = torchrun(TRAIN, "--dataset", "digits", "--epochs", "1", folder=tmp_path)
    assert first.count("epoch 1:") == 1  # only one rank prints
    assert accuracy(first) > 0.3  # ten classes: an untrained model has about 0.1

    # The checkpoint of two ranks, on three.
    arguments = ("--dataset", "digits", "--epochs", "2", "--resume")
    second, *others = run(TRAIN, *arguments, folder=tmp_path, size=3)
    assert re.findall(r"epoch (\d):", second.output) == ["2"]
    assert accuracy(second.output) > accuracy(first)
    assert [other.output for other in others] == ["", ""]


@pytest.mark.parametrize("contents", [None, b"no checkpoint"])
def test_mnist_cannot_resume(tmp_path: Path, contents: bytes | None) -> None:
    if contents is not None:
        (tmp_path / "checkpoint.pt").write_bytes(contents)
    first, second = run(TRAIN, "--dataset", "digits", "--resume", folder=tmp_path)
    assert str(first.code).startswith("cannot resume from checkpoint.pt: ")
    assert second.code == 1
    assert first.output == second.output == ""


def test_mnist_without_a_network_trains_on_digits(tmp_path: Path) -> None:
    (alone,) = run(TRAIN, "--epochs", "1", folder=tmp_path, size=1, env=NO_NETWORK)
    assert "MNIST cannot be had" in alone.output
    assert accuracy(alone.output) > 0.3


def test_readme_diff_makes_a_script_parallel(tmp_path: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text("\n".join(line[1:] for line in lines if line[:1] != "+"))
    after.write_text("\n".join(line[1:] for line in lines if line[:1] != "-"))

    (alone,) = run(before, folder=tmp_path, size=1)
    together, silent = run(after, folder=tmp_path)
    assert silent.output == ""
    losses = [
        [float(loss) for loss in re.findall(r"loss (\S+)", output)]
        for output in (alone.output, together.output)
    ]
    assert [len(of_run) for of_run in losses] == [3, 3]
    assert all(of_run[-1] < of_run[0] / 10 for of_run in losses)


def test_benchmark_checks_what_it_times(tmp_path: Path) -> None:
    collectives = ("allreduce", "broadcast", "allgather")
    first, second = run(
        ROOT / "benchmarks" / "collectives.py",
        *("--collective", *collectives, "--max-bytes", "4096", "--shared"),
        *("--rounds", "1", "--iterations", "5", "--json", "out.json"),
        folder=tmp_path,
    )
    assert (first.code, second.code) == (0, 0), first.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["collective"], row["bytes"], row["memory"]) for row in rows] == [
        (collective, size, memory)
        for collective in collectives
        for size in (1024, 4096)
        for memory in ("private", "shared")
    ]
    for row in rows:
        wrong = {library: result["wrong"] for library, result in row["results"].items()}
        assert wrong == {"torch_ring": 0, "gloo": 0}


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
