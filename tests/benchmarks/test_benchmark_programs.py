# SPDX-License-Identifier: Apache-2.0
"""The benchmark programs run, check their results, and report; the times are not tested."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import suite
import torch
from launcher_commands import clean_environment
from namespaces import why_none
from on_ranks import on_ranks
from recovery import Step, loss_of
from scripts import DEADLINE_S, ROOT, run
from waiting_ranks import why_no_mpi

import torch_ring
import torch_ring as hvd

BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
COLLECTIVES = ("allreduce", "reducescatter", "broadcast", "allgather", "alltoall")
VARIANTS = ("torch_ring", "ddp", "ddp_ring", "nan_check")
PEERS = ("gloo", "ring-c10d", "fake-c10d", "copy", "touch")


# --- programs in which each rank is a process of a launcher


@pytest.mark.weekly
def test_programs_on_two_ranks(tmp_path: Path) -> None:
    all_of = ("--collective", *COLLECTIVES, "--shared")
    all_of += ("--peers", *PEERS, "--dtypes", "float32", "bfloat16")
    short = ("--rounds", "1", "--round-s", "0.01")
    rows = {}
    for name, *arguments in (
        ("collectives", *all_of, "--max-bytes", "1024", "--rounds", "1", "--iterations", "2"),
        ("training_step", "--models", "mnist", "pinn", "--variants", *VARIANTS, *short),
        ("sharded_step", "--rounds", "1", "--steps", "1"),
        ("slow_links", "--rounds", "1", "--every", "2"),
    ):
        output = ("--json", f"{name}.json")
        first, second = run(BENCHMARKS / f"{name}.py", *arguments, *output, folder=tmp_path)
        assert (first.code, second.code) == (0, 0), first
        assert len(first.output.splitlines()) > 3
        assert second.output == ""  # one rank prints
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert report["machine"]["ranks"] == 2
        assert f"benchmarks/{name}.py" in report["command"]
        rows[name] = report["rows"]
    check_collectives(rows["collectives"])
    for row in rows["training_step"]:
        assert row["gradients_differ"] < 1e-4
        assert row["step_ms"] > 0
        if row["variant"] == "torch":
            assert (row["exposed_ms"], row["efficiency"]) == (0, 1)
    variants = [row["variant"] for row in rows["sharded_step"]]
    assert variants == ["fake", "gloo", "ring", "ring_shared"]
    assert [row["variant"] for row in rows["slow_links"]] == ["ddp", "distributed", "diloco"]


def check_collectives(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 2 * 2 * len(COLLECTIVES)  # dtypes, memories
    for row in rows:
        of_all = 1024 // (4 if row["type"] == "float32" else 2)
        assert row["count"] == (of_all // 2 if row["collective"] == "allgather" else of_all)
        wrong = {library: result["wrong"] for library, result in row["results"].items()}
        assert wrong == dict.fromkeys(("torch_ring", *PEERS), 0)
        ours, gloo = (row["results"][each] for each in ("torch_ring", "gloo"))
        assert row["ratios"]["gloo"] == pytest.approx(gloo["time_us"] / ours["time_us"])
        # On two ranks: 2 (n - 1) / n is 1, (n - 1) / n a half.
        share = 1 if row["collective"] in ("allreduce", "broadcast") else 0.5
        assert ours["algbw"] == pytest.approx(1024 / ours["time_us"] / 1e3)
        assert ours["busbw"] == pytest.approx(share * ours["algbw"])


@on_ranks(3)
def test_wrong_elements_are_counted() -> None:
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
    assert {*found} == {*COLLECTIVES}
    assert all(wrong == {"torch_ring": 0, "spoilt": 3} for wrong in found.values())


@on_ranks(2)
def test_a_replica_that_does_not_average_is_noticed() -> None:
    """By its distance from another one."""
    training_step, workloads = map(importlib.import_module, ("training_step", "workloads"))
    importlib.import_module("peers").start_gloo()
    pinn, variants = workloads.WORKLOADS["pinn"], ("torch", "torch_ring", "ddp")
    found = training_step.replicas_of(pinn, 4, variants)
    for replica in found.values():
        replica.step()
    together = training_step.difference(found["torch_ring"], found["ddp"])
    apart = training_step.difference(found["torch_ring"], found["torch"])
    importlib.import_module("peers").stop_gloo()
    assert together < 1e-5
    assert apart > 1e-3


# --- programs that start their ranks


@pytest.fixture(scope="module")
def among_hosts() -> tuple[str, ...]:
    """Return the options of init_scale.py for a world among two namespaces, if possible."""
    return ("--namespaces", *([] if why_none() else ["2"]), "--ranks-per-host", "2")


def rows_of(program: str, *arguments: str, folder: Path) -> list[dict[str, Any]]:
    """Run a program to its end; return its rows."""
    folders = (str(BENCHMARKS), str(Path(torch_ring.__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / program), "--json", "out.json", *arguments],
        cwd=folder,
        env=clean_environment(PYTHONPATH=os.pathsep.join(folders)),
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,  # one job after the other
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "out.json").read_text())
    assert program in report["command"]
    assert len(done.stdout.splitlines()) > len(report["rows"])
    return report["rows"]


@pytest.mark.weekly
def test_sharded_state(tmp_path: Path) -> None:
    options = ["--ranks", "2", "--parameters", "100000", "--rounds", "1", "--steps", "1"]
    rows = rows_of("sharded_state.py", *options, "--variants", "sharded", "zero", folder=tmp_path)
    assert [row["variant"] for row in rows] == ["sharded", "zero"]
    assert all(0 < row["step_ms"] < row["whole_ms"] for row in rows)


@pytest.mark.weekly
@pytest.mark.netns
def test_hosts(tmp_path: Path) -> None:
    if missing := why_none():
        pytest.skip(f"no network namespaces here: {missing}")
    options = "--hosts 2 --rate 1gbit --window 65536 --plain-sockets --seconds 0 -- "
    options += "--max-bytes 1024 --rounds 1 --iterations 2"
    (row,) = rows_of("hosts.py", *options.split(), folder=tmp_path)
    assert {library: result["wrong"] for library, result in row["results"].items()} == {
        "torch_ring": 0,
        "gloo": 0,
    }


@pytest.mark.slow
def test_the_start_of_a_world(tmp_path: Path, among_hosts: tuple[str, ...]) -> None:
    options = ("--sizes", "3", "2", "--rounds", "1", "--timeout", "60", *among_hosts)
    here = ["torch_ring", "gloo"] if why_no_mpi() else ["torch_ring", "gloo", "mpi"]
    expected = [(1, size, library) for size in (2, 3) for library in here]
    if "2" in among_hosts:
        expected += [(2, 4, "torch_ring"), (2, 4, "gloo")]
    rows = rows_of("init_scale.py", *options, folder=tmp_path)
    assert [(row["hosts"], row["ranks"], row["library"]) for row in rows] == expected
    for row in rows:
        assert (row["error"], row["rounds"]) == (None, 1)
        assert 0 < row["least_s"] <= row["seconds"] <= row["most_s"]


@pytest.mark.slow
def test_the_news_of_a_killed_rank(tmp_path: Path, among_hosts: tuple[str, ...]) -> None:
    rows = rows_of("init_scale.py", "--death", "--sizes", "3", *among_hosts, folder=tmp_path)
    assert {(row["ranks"], row["victim"]) for row in rows} >= {(3, 2), (3, 0)}
    for row in rows:
        assert row["error"] is None
        assert (row["heard"], row["otherwise"]) == (row["ranks"] - 1, 0), row
        assert 0 < row["median_ms"] <= row["slowest_ms"] < 60_000


@pytest.mark.weekly
def test_losses(tmp_path: Path) -> None:
    cases = ["torch_ring, standby", *([] if why_none() else ["cut off"])]
    rows = rows_of("recovery.py", "--rounds", "1", "--cases", *cases, folder=tmp_path)
    assert sorted(row["what"] for row in rows) == sorted(cases)
    for row in rows:
        assert (row["ranks"], row["rounds"]) == (4, 1)
        assert row["hosts"] == (2 if row["what"] == "cut off" else 1)
        assert (row["whole_s"] is not None) == (row["what"] != "cut off")


def test_steps_of_survivors_that_the_launcher_ends_do_not_count() -> None:
    of_4 = [Step(9.0, 4, 0), Step(9.9, 4, 0)]
    alone = [Step(10.2, 3, 0)]
    new = {3: [Step(14.0, 4, 0)], 4: [Step(14.5, 4, 1)]}
    loss = loss_of({2: of_4 + alone, **new}, 10.0)
    step_s = (0.9 + 0.3) / 2
    assert (loss.ms, loss.whole_s) == pytest.approx((1e3 * (4.5 - step_s), 4.5))
    # Quarters of a second from -2 to 4: those with steps of rank 0 are at -1, -0.25 and 0.
    assert [index for index, rate in enumerate(loss.steps_per_s) if rate] == [4, 7, 8]
    loss = loss_of({2: [*of_4, *alone, Step(14.6, 4, 0)], 4: new[4]}, 10.0, heartbeat_s=0.1)
    assert loss.ms == pytest.approx(1e3 * (0.2 - 0.9 - 0.1))
    assert loss.whole_s == pytest.approx(4.5)


# --- the suite


def test_commands_of_the_suite_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name, benchmark in suite.BENCHMARKS.items():
        command = benchmark.command(name)
        assert Path(command[command.index("--json") - 1]).exists()
        monkeypatch.setattr(sys, "argv", command[command.index("--json") - 1 :])
        args = importlib.import_module(Path(benchmark.program).stem).parse_args()
        assert args.json == Path("benchmarks", "results", f"{name}.json")
        if benchmark.program == "hosts.py":
            program = importlib.import_module(Path(args.program).stem)
            monkeypatch.setattr(sys, "argv", [args.program, *args.arguments])
            program.parse_args()


@pytest.mark.weekly
def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    files = importlib.import_module("plots").draw_all(tmp_path)
    names = {path.stem for path in RESULTS.glob("*.png")} - {"input_pipeline"}
    assert {file.stem for file in files} == names
    for file in files:
        assert file.read_bytes()[:4] == b"\x89PNG"
        assert 1000 < file.stat().st_size < 60_000


@pytest.mark.weekly
def test_input_pipeline(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("torchvision")
    script = BENCHMARKS / "input_pipeline.py"
    fast = ("--epoch-steps", "3", "--steps", "1", "--rounds", "1", "--workers", "0")
    small = ("--batch-size", "2", "--augment", "0", "--pretend-ms", "1", "--file", "out.jsonl")
    for size in (2, 1):
        outputs = run(script, *fast, *small, folder=tmp_path, size=size)
        assert [output.code for output in outputs] == [None] * size
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["ranks"] for row in rows] == [2, 1]
    for row in rows:
        assert row["gap"] == pytest.approx(1 - row["rates"]["real"] / row["rates"]["synthetic"])
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(script.parent)
    arguments = ["--ranks", "--file", "out.jsonl", "--plot", "curves.png"]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")
    assert "# stand-in, 1 ms, 0 x RandAugment, batch 2 of 64 x 64" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
