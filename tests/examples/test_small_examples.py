# SPDX-License-Identifier: Apache-2.0
"""The small examples: their output, their checkpoints, the same results on any ranks."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import re
import runpy
import signal
import sys
from pathlib import Path

import pool
import pytest
import torch
from launched_jobs import LaunchedJob
from ports import free_port
from scripts import DEADLINE_S, ROOT, Run, run, run_script
from torch import distributed

import torch_ring as hvd
from torch_ring.horovod import install

EXAMPLES = ROOT / "examples"
OPTIONS = {
    "function_approximation": (),
    "horovod_migration": (),
    "mnist": ("--dataset", "digits"),
    "pinn": (),
}
SIGINT_ENDS_IT = "    signal.signal(signal.SIGINT, signal.SIG_DFL)"


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(2)}, "history": [], "program": "a program of mine"}
    torch.save(state, tmp_path / "mine.pt")
    (tmp_path / "empty.pt").touch()  # of an incomplete copy
    for file, problem in (
        ("mine.pt", r"mine\.pt.* is of (another program|a program of mine)"),
        ("empty.pt", r"^cannot .*empty\.pt"),
    ):
        options = (*OPTIONS[name], "--resume", "--checkpoint", file)
        first, second = run(EXAMPLES / name / "train.py", *options, folder=tmp_path)
        assert re.search(problem, str(first.code)), first
        assert "\n" not in str(first.code)
        assert (second.code, first.output, second.output) == (1, "", "")


def test_ctrl_c_ends_every_example() -> None:
    for script in EXAMPLES.glob("*/*.py"):
        text = script.read_text()
        if "hvd.init()" in text and script.parent.name != "minimal":
            assert text.index(SIGINT_ENDS_IT) < text.index("    hvd.init()"), script


@pytest.mark.slow
@pytest.mark.launcher
def test_ctrl_c_prints_no_traceback(tmp_path: Path) -> None:
    script = str(EXAMPLES / "mnist" / "train.py")
    command = (sys.executable, "-u", script, *OPTIONS["mnist"])
    job = LaunchedJob("-np", "2", *command, folder=tmp_path, PYTHONPATH=str(ROOT))
    job.wait_for("epoch 1")
    job.signal(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT
    job.require_nothing_left()
    assert "Traceback" not in job.stdout + job.stderr


FROM_SCRATCH = ROOT / "examples" / "from_scratch" / "train.py"


def train_twice(store: str) -> None:
    """Train by the example's optimizer over gloo, then by ours."""
    example, rank, size = runpy.run_path(str(FROM_SCRATCH)), hvd.rank(), hvd.size()
    example["train"].__globals__["range"] = lambda count: range(min(count, 50))  # fewer steps
    torch.set_default_dtype(torch.float64)
    try:
        distributed.init_process_group(
            "gloo", store=distributed.FileStore(store, size), rank=rank, world_size=size
        )
        scratch, _ = example["train"](example["DistributedOptimizer"], rank, size)
        distributed.destroy_process_group()
        ours, _ = example["train"](hvd.DistributedOptimizer, rank, size)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(ours.parameters(), scratch.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_from_scratch_ends_with_the_weights_of_the_real_optimizer(tmp_path: Path) -> None:
    pool.run(train_twice, 2, args=(str(tmp_path / "store"),))


@pytest.mark.weekly
def test_from_scratch_runs_as_a_script(tmp_path: Path) -> None:
    first, second = run(FROM_SCRATCH, folder=tmp_path)
    biases = [
        re.findall(r"rank \d: loss 0\.00\d+, bias (\S+)", each.output) for each in (first, second)
    ]
    assert len(biases[0]) == 1
    assert biases[0] == biases[1]


TRAIN = ROOT / "examples" / "minimal" / "train.py"


def versions(page: str) -> tuple[str, str]:
    """Return the program before and after the diff on a page."""
    (diff,) = re.findall(
        r"```diff\n(--- train\w*.py\n.*?)```", (ROOT / page).read_text(), re.DOTALL
    )
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    before, after = (
        "".join(f"{line[1:]}\n" for line in lines if not line.startswith(other)) for other in "+-"
    )
    return before, after


def losses(outcome: Run) -> list[float]:
    assert outcome.code is None, outcome
    return [float(loss) for loss in re.findall(r"loss (\S+)", outcome.output)]


def test_readme_shows_the_program() -> None:
    before, after = versions("README.md")
    assert after == TRAIN.read_text()
    assert "hvd" not in before
    assert len(after.splitlines()) <= 50


def test_minimal_trains_as_well_on_several_ranks_as_alone(tmp_path: Path) -> None:
    script = tmp_path / "before.py"
    script.write_text(versions("README.md")[0])
    (single,) = run(script, folder=tmp_path, size=1)
    last = losses(single)[-1]
    assert 0 < last < losses(single)[0] / 1000
    for size in (1, 3):
        (tmp_path / "model.pt").unlink()
        first, *others = run(TRAIN, folder=tmp_path, size=size)
        assert [other.output for other in others] == [""] * (size - 1)
        assert len(losses(first)) == 3
        assert last / 10 < losses(first)[-1] < last * 10
        assert set(torch.load(tmp_path / "model.pt")) == {"weight", "bias"}


def test_ddp_ends_with_the_same_weights(tmp_path: Path) -> None:
    of_gloo = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    outputs, models = [], []
    for name, text in zip(("before", "after"), versions("docs/migrating-from-ddp.md"), strict=True):
        folder = tmp_path / name
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(text)
        env = of_gloo if name == "before" else {}
        first, second = run(script, folder=folder, env=env)
        assert (first.code, second.code, second.output) == (None, None, "")
        outputs.append([float(loss) for loss in re.findall(r"loss (\S+)", first.output)])
        models.append(torch.load(folder / "model.pt"))
    assert len(outputs[0]) == 3
    assert outputs[0][-1] < outputs[0][0] / 2
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-4)
    torch.testing.assert_close(models[1], models[0], rtol=1e-4, atol=1e-6)


GENERATE = ROOT / "examples" / "tensor_parallel" / "generate.py"
SMALL = ("--tokens", "8", "--layers", "2", "--width", "64", "--dtype", "float32")


def tokens(folder: Path, *options: str, size: int) -> list[int]:
    first, *others = run(GENERATE, *SMALL, *options, folder=folder, size=size)
    assert all(each.output == "" and each.code is None for each in others)
    found: list[int] = ast.literal_eval(first.output.partition("they begin ")[2])
    return found


@pytest.mark.parametrize("options", [(), ("--over", "ring")], ids=["torch_ring", "ring"])
def test_tensor_parallel_generates_the_tokens_of_one_process(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    alone = tokens(tmp_path, "--eager", size=1)
    assert len(set(alone)) > 3
    assert tokens(tmp_path, "--eager", *options, size=2) == alone


needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="there is no torchvision"
)
BENCHMARK = ROOT / "examples" / "synthetic_benchmark" / "benchmark.py"
# Horovod's lines, which its users' scripts look for.
ITERATION = r"Iter #\d+: \d+\.\d img/sec per CPU"
PER_DEVICE = r"Img/sec per CPU: (\d+\.\d) \+-\d+\.\d"
IN_ALL = r"Total img/sec on {size} CPU\(s\): (\d+\.\d) \+-\d+\.\d"


@needs_torchvision
def test_benchmark_prints_what_horovods_does(tmp_path: Path) -> None:
    size = 2
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
@needs_torchvision
def test_benchmark_compares_with_ddp(tmp_path: Path) -> None:
    options = ("--smoke", "--compare", "ddp", "--json", "out.json")
    output = run(BENCHMARK, *options, folder=tmp_path)[0].output
    turns = re.findall(r"^Iter #(\d)(?: \((DDP)\))?:", output, re.MULTILINE)
    assert turns == [("0", ""), ("0", "DDP"), ("1", "DDP"), ("1", "")], output
    report = json.loads((tmp_path / "out.json").read_text())
    ring, ddp = (report["results"][library] for library in ("torch_ring", "DDP"))
    assert report["ratio"] == pytest.approx(ring["img_sec_median"] / ddp["img_sec_median"])
    assert f"--- torch_ring / DDP: {report['ratio']:.3f} (of the medians)\n" in output


EXAMPLE = ROOT / "examples" / "horovod_migration"
MIGRATED = EXAMPLE / "train.py"
HOROVOD = EXAMPLE / "train_horovod.py"


@pytest.mark.slow
def test_migration_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    outputs = ("--plot", "picture.png", "--tensorboard", "events")
    first, second = run(MIGRATED, "--smoke", *outputs, folder=tmp_path)
    assert first.output.startswith("epoch 1: loss ")
    assert second == Run(None, "")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "events").rglob("*tfevents*"))
    resumed = run(MIGRATED, "--epochs", "2", "--resume", folder=tmp_path, size=3)[0]
    assert re.findall(r"^epoch (\d):", resumed.output, re.MULTILINE) == ["2"]


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
