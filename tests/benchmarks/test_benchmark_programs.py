# SPDX-License-Identifier: Apache-2.0
"""The benchmark programs run, check their results, and report; the times are not tested."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pool
import pytest
import suite
import targets
import torch
from launcher_commands import clean_environment
from namespaces import why_none
from recovery import Step, loss_of
from scripts import DEADLINE_S, ROOT, run

import torch_ring
import torch_ring as hvd

BENCHMARKS = ROOT / "benchmarks"
COLLECTIVES = ("allreduce", "reducescatter", "broadcast", "allgather", "alltoall")
MEMORIES = ("private", "shared")


def needs_namespaces(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """Mark a test that needs root, network namespaces and `tc`."""
    for mark in (
        pytest.mark.netns,
        pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
        pytest.mark.skipif(shutil.which("tc") is None, reason="there is no `tc` (iproute2)"),
    ):
        test = mark(test)
    return test


VARIANTS = ("torch_ring", "ddp", "ddp_ring", "nan_check")
PEERS = ("gloo", "ring-c10d", "fake-c10d", "copy", "touch")


@pytest.mark.weekly
def test_programs_on_two_ranks(tmp_path: Path) -> None:
    all_of = ("--collective", *COLLECTIVES, "--shared")
    all_of += ("--peers", *PEERS, "--dtypes", "float32", "bfloat16")
    short = ("--rounds", "1", "--round-s", "0.01")
    commands = [
        ("collectives", *all_of, "--max-bytes", "1024", "--rounds", "1", "--iterations", "2"),
        ("training_step", "--models", "mnist", "pinn", "--variants", *VARIANTS, *short),
        ("sharded_step", "--rounds", "1", "--steps", "1"),
        ("slow_links", "--rounds", "1", "--every", "2"),
    ]
    reports = {}
    for name, *arguments in commands:
        output = ("--json", f"{name}.json")
        first, second = run(BENCHMARKS / f"{name}.py", *arguments, *output, folder=tmp_path)
        assert (first.code, second.code) == (0, 0), first
        assert len(first.output.splitlines()) > 3
        assert second.output == ""  # one rank prints
        reports[name] = json.loads((tmp_path / f"{name}.json").read_text())
        assert reports[name]["machine"]["ranks"] == 2
        assert f"benchmarks/{name}.py" in reports[name]["command"]
    check_collectives(reports["collectives"]["rows"])
    check_training_step(reports["training_step"]["rows"])
    assert [row["variant"] for row in reports["sharded_step"]["rows"]] == [
        "fake",
        "gloo",
        "ring",
        "ring_shared",
    ]
    rows = reports["slow_links"]["rows"]
    assert [row["variant"] for row in rows] == ["ddp", "distributed", "diloco"]
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.weekly
def test_sharded_state(tmp_path: Path) -> None:
    sizes = ("--ranks", "2", "--parameters", "100000", "--rounds", "1", "--steps", "1")
    command = [sys.executable, str(BENCHMARKS / "sharded_state.py"), *sizes, "--json", "out.json"]
    command += ["--variants", "sharded", "zero"]
    late_s = 3 * DEADLINE_S  # a job for the memory of each, and one for the times
    done = subprocess.run(command, cwd=tmp_path, timeout=late_s, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["ranks"] == 2
    assert [row["variant"] for row in report["rows"]] == ["sharded", "zero"]
    assert all(0 < row["step_ms"] < row["whole_ms"] for row in report["rows"])
    assert done.stdout.splitlines()[0].startswith("# Adam, 0.1 M parameters; ")


def check_collectives(rows: list[dict[str, Any]]) -> None:
    assert [(row["collective"], row["type"], row["memory"]) for row in rows] == [
        (collective, dtype, memory)
        for collective in COLLECTIVES
        for dtype in ("float32", "bfloat16")
        for memory in MEMORIES
    ]
    for row in rows:
        assert row["bytes"] == 1024
        of_all = 1024 // (4 if row["type"] == "float32" else 2)
        assert row["count"] == (of_all // 2 if row["collective"] == "allgather" else of_all)
        wrong = {library: result["wrong"] for library, result in row["results"].items()}
        assert wrong == dict.fromkeys(("torch_ring", *PEERS), 0)
        ours = row["results"]["torch_ring"]
        assert row["ratios"].keys() == set(PEERS)
        gloo = row["results"]["gloo"]["time_us"]
        assert row["ratios"]["gloo"] == pytest.approx(gloo / ours["time_us"])
        # On two ranks: 2 (n - 1) / n is 1, (n - 1) / n a half.
        share = 1 if row["collective"] in ("allreduce", "broadcast") else 0.5
        assert ours["algbw"] == pytest.approx(1024 / ours["time_us"] / 1e3)
        assert ours["busbw"] == pytest.approx(share * ours["algbw"])


def check_training_step(rows: list[dict[str, Any]]) -> None:
    variants = ["torch", *VARIANTS, "barrier", "one process"]
    assert [(row["model"], row["variant"]) for row in rows] == [
        (model, variant) for model in ("mnist", "pinn") for variant in variants
    ]
    for row in rows:
        assert row["gradients_differ"] < 1e-4
        assert row["step_ms"] > 0
        if row["variant"] == "torch":
            assert (row["exposed_ms"], row["efficiency"]) == (0, 1)
        if row["variant"] == "barrier":
            assert row["beyond_ms"] == 0
    assert rows[0]["gradient_bytes"] == 4 * 1_199_882  # the parameters of examples/mnist


def test_mpi_without_mpirun_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run(BENCHMARKS / "collectives.py", "--peers", "mpi", folder=tmp_path)
    assert "only mpirun can start" in str(first.code)
    assert second.code == 1


def end_of_start_deepspeed(hosts: int) -> str | int | None:
    """Return the exit code of a rank that starts the peer without the package."""
    without = mock.patch.dict(sys.modules, {"deepspeed": None})
    among_hosts = mock.patch.object(hvd, "cross_size", return_value=hosts)
    with without, among_hosts, pytest.raises(SystemExit) as ended:
        importlib.import_module("peers").start_deepspeed()
    return ended.value.code


@pytest.mark.parametrize(("hosts", "why"), [(1, "needs deepspeed, ninja"), (2, "of one host")])
def test_deepspeed_is_refused_on_all_ranks(hosts: int, why: str) -> None:
    first, second = pool.run(end_of_start_deepspeed, 2, args=(hosts,))
    assert why in str(first)
    assert second == 1


def count_wrong_elements() -> dict[str, dict[str, int]]:
    collectives, peers = map(importlib.import_module, ("collectives", "peers"))
    found = {}
    for collective in collectives.BUS_SHARE:
        case, _ = collectives.make_case(collective, "sum", 64, torch.float32, "private")
        runs = peers.runs_of(case, [])

        def spoilt(run: peers.Run = runs["torch_ring"]) -> torch.Tensor:
            result = run().clone()
            result[hvd.rank()] += 1
            return result

        found[collective] = collectives.wrong_elements(case, runs | {"spoilt": spoilt})
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_wrong_elements_are_counted(size: int) -> None:
    for found in pool.run(count_wrong_elements, size):
        assert list(found) == ["allreduce", "broadcast", "allgather", "reducescatter", "alltoall"]
        assert all(wrong == {"torch_ring": 0, "spoilt": size} for wrong in found.values())


def distances_of_replicas() -> tuple[float, float]:
    """Return the distance of two replicas that average gradients, and of two that do not."""
    training_step, workloads = map(importlib.import_module, ("training_step", "workloads"))
    importlib.import_module("peers").start_gloo()
    pinn, variants = workloads.WORKLOADS["pinn"], ("torch", "torch_ring", "ddp")
    found = training_step.replicas_of(pinn, 4, variants)
    for replica in found.values():
        replica.step()
    together = training_step.difference(found["torch_ring"], found["ddp"])
    apart = training_step.difference(found["torch_ring"], found["torch"])
    importlib.import_module("peers").stop_gloo()
    return together, apart


def test_a_replica_that_does_not_average_is_noticed() -> None:
    for together, apart in pool.run(distances_of_replicas, 2):
        assert together < 1e-5
        assert apart > 1e-3


def run_between_hosts(command: str, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Run a program that makes hosts; return its report and its output."""
    program, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / program), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if "netns add" in done.stderr:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert f"bench{os.getpid()}" not in namespaces
    return json.loads((tmp_path / "out.json").read_text()), done.stdout


@pytest.mark.weekly
@needs_namespaces
def test_benchmark_between_hosts(tmp_path: Path) -> None:
    command = "hosts.py --hosts 2 --rate 1gbit --window 65536 --plain-sockets --seconds 0 "
    command += "--json out.json -- --max-bytes 1024 --rounds 1 --iterations 2"
    report, output = run_between_hosts(command, tmp_path)
    (row,) = report["rows"]
    assert {library: r["wrong"] for library, r in row["results"].items()} == {
        "torch_ring": 0,
        "gloo": 0,
    }
    assert (report["machine"]["hosts"], report["machine"]["rate"]) == (2, "1gbit")
    assert report["machine"]["window"] == 65536
    assert report["traffic"]["tool"] == "plain sockets"
    assert report["traffic"]["before_gb_per_s"] > 0
    assert "plain sockets, each of 2 hosts to the next at once" in output


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


@pytest.mark.weekly
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


SCRIPT = ROOT / "benchmarks" / "input_pipeline.py"


@pytest.mark.weekly
def test_from_jobs_to_curves(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("torchvision")
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


BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.weekly
def test_losses(tmp_path: Path) -> None:
    cases = ["cut off", "torch_ring, standby"]
    folders = (str(BENCHMARKS), str(Path(torch_ring.__file__).parents[1]))
    options = ["--cases", *cases, "--rounds", "1", "--json", "out.json"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "recovery.py"), *options],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=os.pathsep.join(folders)),
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE_S,  # one case after the other
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    if why_none() is not None:
        cases.remove("cut off")
    assert [row["what"] for row in rows] == cases
    for row in rows:
        assert (row["ranks"], row["rounds"]) == (4, 1)
        assert row["hosts"] == (2 if row["what"] == "cut off" else 1)
        assert row["median_ms"] == row["least_ms"] == row["most_ms"]
        assert row["step_ms"] > 0
        assert (row["whole_s"] is not None) == (row["what"] == cases[-1])
        assert row["steps_per_s"][0] > 0
    assert "torch_ring, standby: rank 0 lost: goes on after " in done.stdout


def test_steps_of_survivors_that_the_launcher_ends_do_not_count() -> None:
    of_4 = [Step(9.0, 4, 0), Step(9.9, 4, 0)]
    alone = [Step(10.2, 3, 0)]
    new = {3: [Step(14.0, 4, 0)], 4: [Step(14.5, 4, 1)]}
    loss = loss_of({2: of_4 + alone, **new}, 10.0)
    step_s = (0.9 + 0.3) / 2
    assert (loss.ms, loss.whole_s) == pytest.approx((1e3 * (4.5 - step_s), 4.5))
    # Quarters of a second from -2 to 4: those with steps of rank 0 are at -1, -0.25 and 0.
    assert [index for index, rate in enumerate(loss.steps_per_s) if rate] == [4, 7, 8]
    assert len(loss.steps_per_s) == 24
    loss = loss_of({2: [*of_4, *alone, Step(14.6, 4, 0)], 4: new[4]}, 10.0, heartbeat_s=0.1)
    assert loss.ms == pytest.approx(1e3 * (0.2 - 0.9 - 0.1))
    assert loss.whole_s == pytest.approx(4.5)


def test_without_a_launcher_the_survivors_alone_count() -> None:
    dead = [Step(9.0, 4, 1), Step(9.5, 4, 1)]
    survivors = [[Step(9.0, 4, rank), Step(9.5, 4, rank)] for rank in (0, 2)]
    survivors[0].append(Step(10.25, 3, 0))
    survivors[1].append(Step(10.75, 3, 1))
    loss = loss_of(dict(enumerate([dead, *survivors])), 10.0)
    assert loss.whole_s is None
    assert loss.ms == pytest.approx(1e3 * (0.75 - 0.5))
