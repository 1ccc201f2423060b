"""The benchmark programs run, check their results, and report; the times are not tested."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pool
import pytest
import torch
from scripts import DEADLINE_S, ROOT, run

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
