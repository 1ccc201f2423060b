"""The benchmark programs run, check what they time, and say what they found; not how long."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pool
import pytest
import suite
import targets
import torch
from scripts import DEADLINE_S, ROOT, run

import torch_ring as hvd

BENCHMARKS = ROOT / "benchmarks"

COLLECTIVES = ("allreduce", "reducescatter", "broadcast", "allgather", "alltoall")
MEMORIES = ("private", "shared")


def test_programs_with_ranks(tmp_path: Path) -> None:
    all_of = ("--collective", *COLLECTIVES, "--shared")
    all_of += ("--peers", "gloo", "copy", "touch", "--dtypes", "float32", "bfloat16")
    commands = [
        ("collectives", *all_of, "--max-bytes", "1024", "--rounds", "1", "--iterations", "2"),
        ("overhead", "--steps", "2", "--rounds", "2", "--compute-s", "0.01"),
        ("training_step", "--models", "mnist", "pinn", "--rounds", "1", "--round-s", "0.01"),
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
    check_overhead(reports["overhead"])
    check_training_step(reports["training_step"]["rows"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the prototype is for x86-64")
def test_the_prototype(tmp_path: Path) -> None:
    sizes = ("--min-bytes", "3145740", "--factor", "6", "--max-bytes", "20000000")
    what = ("--collective", "allreduce", "broadcast", "--peers", "prototype", "--rounds", "1")
    what += ("--iterations", "2")
    output = ("--json", "prototype.json")
    first, second = run(BENCHMARKS / "collectives.py", *what, *sizes, *output, folder=tmp_path)
    assert (first.code, second.code) == (0, 0), first
    rows = json.loads((tmp_path / "prototype.json").read_text())["rows"]
    # The last segment is shorter; the larger one is copied past the caches.
    assert [row["count"] for row in rows] == [786_435, 4_718_610] * 2
    assert [row["results"]["prototype"]["wrong"] for row in rows] == [0] * 4


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
        assert {library: r["wrong"] for library, r in row["results"].items()} == {
            "torch_ring": 0,
            "gloo": 0,
            "copy": 0,
            "touch": 0,
        }
        ours = row["results"]["torch_ring"]
        assert row["ratios"].keys() == {"gloo", "copy", "touch"}
        gloo = row["results"]["gloo"]["time_us"]
        assert row["ratios"]["gloo"] == pytest.approx(gloo / ours["time_us"])
        # On two ranks: 2 (n - 1) / n is 1, (n - 1) / n a half.
        share = 1 if row["collective"] in ("allreduce", "broadcast") else 0.5
        assert ours["algbw"] == pytest.approx(1024 / ours["time_us"] / 1e3)
        assert ours["busbw"] == pytest.approx(share * ours["algbw"])


def check_overhead(report: dict[str, Any]) -> None:
    assert [(row["model"], row["variant"], row["parameters"]) for row in report["rows"]] == [
        (model, variant, count)
        for model, count in (("500 parameters", 500), ("pinn", 6))
        for variant in ("torch", "torch_ring", "ddp")
    ]
    for row in report["rows"]:
        assert row["step_us"] > 0
        assert row["host_us_a_parameter"] == pytest.approx(row["host_us"] / row["parameters"])
        assert (row["collective_us"] == 0) == (row["variant"] == "torch")
    assert report["init"]["relative"] > 0
    low, high = report["init"]["control_quartiles"]
    assert 0 < low <= report["init"]["control"] <= high


def check_training_step(rows: list[dict[str, Any]]) -> None:
    variants = ["torch", "torch_ring", "ddp", "barrier", "one process"]
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


def counts_wrong_elements() -> dict[str, dict[str, int]]:
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
    for found in pool.run(counts_wrong_elements, size):
        assert list(found) == ["allreduce", "broadcast", "allgather", "reducescatter", "alltoall"]
        assert all(wrong == {"torch_ring": 0, "spoilt": size} for wrong in found.values())


def trains_apart() -> tuple[float, float]:
    """Return how far apart two ranks are that average, and that do not."""
    replicas, workloads = map(importlib.import_module, ("replicas", "workloads"))
    importlib.import_module("peers").start_gloo()
    found = replicas.replicas_of(workloads.WORKLOADS["pinn"], 4)
    for replica in found.values():
        replica.step()
    together = replicas.difference(found["torch_ring"], found["ddp"])
    apart = replicas.difference(found["torch_ring"], found["torch"])
    importlib.import_module("peers").stop_gloo()
    return together, apart


def test_a_replica_that_does_not_average_is_noticed() -> None:
    for together, apart in pool.run(trains_apart, 2):
        assert together < 1e-5
        assert apart > 1e-3


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("tc") is None, reason="there is no `tc` (iproute2)")
def test_hosts(tmp_path: Path) -> None:
    command = "hosts.py --hosts 2 --rate 1gbit --window 65536 --plain-sockets --seconds 0 "
    command += "--json out.json -- --max-bytes 1024 --rounds 1 --iterations 2"
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
    report = json.loads((tmp_path / "out.json").read_text())
    (row,) = report["rows"]
    assert {library: r["wrong"] for library, r in row["results"].items()} == {
        "torch_ring": 0,
        "gloo": 0,
    }
    assert (report["machine"]["hosts"], report["machine"]["rate"]) == (2, "1gbit")
    assert report["machine"]["window"] == 65536
    assert report["traffic"]["tool"] == "plain sockets"
    assert report["traffic"]["before_gb_per_s"] > 0
    assert "plain sockets, each of 2 hosts to the next at once" in done.stdout
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert f"bench{os.getpid()}" not in namespaces


# --- the suite, its plots and its targets


@pytest.mark.parametrize("name", suite.BENCHMARKS)
def test_the_suite_calls_programs_as_they_want(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(suite.ROOT)
    benchmark = suite.BENCHMARKS[name]
    command = benchmark.command(name)
    assert Path(command[command.index("--json") - 1]).exists()
    if benchmark.program != "scaling_model.py":
        parse_args = importlib.import_module(Path(benchmark.program).stem).parse_args
        monkeypatch.setattr(sys, "argv", command[command.index("--json") - 1 :])
        args = parse_args()
        assert args.json == Path("benchmarks", "results", f"{name}.json")
        if benchmark.program == "hosts.py":
            collectives = importlib.import_module("collectives")
            monkeypatch.setattr(sys, "argv", ["collectives.py", *args.collectives])
            collectives.parse_args()


def test_open_mpi_is_a_peer_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "/opt/mpirun")
    command = suite.BENCHMARKS["allreduce"].command("allreduce")
    assert command[0] == "/opt/mpirun"
    assert command[command.index("--peers") + 1 :][:2] == ["mpi", "gloo"]
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    command = suite.BENCHMARKS["allreduce"].command("allreduce")
    assert "torch.distributed.run" in command
    assert "mpi" not in command


def row(collective: str, size_bytes: int, dtype: str, memory: str, **times_us: float) -> Any:
    """Return what collectives.py writes."""
    results = {
        library: {"time_us": time_us, "algbw": 1.0, "busbw": size_bytes / time_us / 1e3, "wrong": 0}
        for library, time_us in times_us.items()
    }
    ratios = {x: t / times_us["torch_ring"] for x, t in times_us.items() if x != "torch_ring"}
    facts = {"collective": collective, "bytes": size_bytes, "type": dtype, "memory": memory}
    return facts | {"results": results, "ratios": ratios}


def made_up_reports() -> dict[str, Any]:
    """Return reports of which every target can be calculated by hand."""
    machine = {"ranks": 2, "cores": 2}
    size_bytes = 64 << 20
    dtypes = ("float32", "bfloat16", "float16")
    peers = {"gloo": 200.0, "mpi": 50.0, "copy": 10.0, "touch": 12.0}
    peers |= {"prototype": 16.0}
    allreduce = [
        row("allreduce", size_bytes, dtype, memory, torch_ring=t, **peers)
        for dtype in dtypes
        for memory, t in (("private", 20.0), ("shared", 16.0))
    ]
    others = [
        row(collective, size_bytes, "float32", "private", torch_ring=10.0, gloo=60.0, **limit)
        for collective, limit in (
            ("allgather", {"touch": 7.5}),
            ("reducescatter", {}),
            ("broadcast", {}),
            ("alltoall", {}),
        )
    ]
    hosts = [row("allreduce", size_bytes, "float32", "private", torch_ring=1e5, gloo=1.6e5)]
    step = {"gradient_bytes": 4, "batch": 2, "efficiency_of_one": 0.9, "gradients_differ": 0.0}
    training = [
        step
        | {"model": "vgg16", "variant": v, "step_ms": 100.0, "exposed_ms": e, "efficiency": f}
        | {"beyond_ms": e - 2.0}
        for v, e, f in (("torch", 0, 1.0), ("torch_ring", 4.0, 0.96), ("ddp", 40.0, 0.7))
    ]
    overhead = [
        {"model": "500 parameters", "parameters": 500, "variant": v, "host_us": h}
        | {"collective_us": 1.0, "step_us": 1.0, "added_us": 1.0, "host_us_a_parameter": h / 500}
        for v, h in (("torch", 0.0), ("torch_ring", 90.0), ("ddp", 300.0))
    ]
    init = {"relative": 0.99, "control": 1.0, "control_quartiles": [0.98, 1.02]}
    return {
        "allreduce": {"machine": machine, "rows": allreduce},
        "collectives": {"machine": machine, "rows": others},
        "hosts-2": {
            "machine": machine,
            "rows": hosts,
            "traffic": {"tool": "iperf3", "before_gb_per_s": 0.5, "after_gb_per_s": 0.7},
        },
        "training_step": {"machine": machine, "rows": training},
        "overhead": {"machine": machine, "rows": overhead, "init": init},
    }


def test_targets() -> None:
    found = {(t.what, t.peer): (t.reached, t.met) for t in targets.targets(made_up_reports())}
    assert found[("allreduce 64 MB", "gloo")] == (10, True)
    assert found[("allreduce 64 MB", "Open MPI")] == (2.5, False)
    assert found[("allreduce 64 MB, shared", "private")] == (1.25, False)
    assert found[("allreduce 64 MB, shared", "a copy's time")] == (1.6, False)
    assert found[("allreduce float16, shared, worst: 64 MB", "float32's time")] == (1, True)
    assert found[("alltoall, worst: 64 MB", "gloo")] == (6, False)
    assert found[("broadcast, worst: 64 MB", "gloo")] == (6, True)
    assert found[("2 hosts, allreduce, worst: 64 MB", "gloo")] == (1.6, True)
    share = (64 << 20) / 1e5 / 1e3 / 0.6
    assert found[("2 hosts, allreduce 64 MB, share", "iperf3")] == (pytest.approx(share), True)
    assert found[("vgg16: exposed communication", "DDP's")] == (0.1, True)
    assert found[("vgg16: exposed, beyond waiting", "DDP's")] == (pytest.approx(2 / 38), True)
    assert found[("vgg16: exposed, share of the step", "")] == (0.04, False)
    assert found[("vgg16: efficiency", "no communication")] == (0.96, True)
    assert found[("500 parameters: host cost", "DDP's")] == (pytest.approx(0.3), False)
    assert found[("init() alone: throughput", "no init()")] == (0.99, True)
    verdicts = {(t.what, t.peer): t.verdict for t in targets.targets(made_up_reports())}
    assert {key for key, verdict in verdicts.items() if verdict} == {
        key for key, (_, met) in found.items() if not met
    }
    # The prototype takes 16 of the 12.5 us that four times Open MPI's speed would be.
    assert verdicts[("allreduce 64 MB", "Open MPI")] == "out of reach"
    assert verdicts[("alltoall, worst: 64 MB", "gloo")] == "missed"  # nobody measured `touch`
    limits = {(t.what, t.peer): t.limit for t in targets.targets(made_up_reports())}
    assert limits[("allgather, worst: 64 MB", "gloo")] == 8  # where there is only `touch`
    assert limits[("allreduce 64 MB, shared", "private")] == 2  # 20 us, and `copy` takes 10
    assert limits[("2 hosts, allreduce, worst: 64 MB", "gloo")] == pytest.approx(1.6 / share)
    lines = list(targets.table(targets.targets(made_up_reports())))
    assert [line.split()[-1] for line in lines if "Open MPI" in line] == ["reach"]
    assert list(targets.targets({})) == []


def test_targets_of_a_part_of_the_results() -> None:
    """Of one dtype, beside one peer: what else is wanted cannot be told."""
    reports = {"allreduce": made_up_reports()["allreduce"]}
    rows = [row for row in reports["allreduce"]["rows"] if row["type"] == "float32"]
    for row in rows:
        row["ratios"] = {"gloo": row["ratios"]["gloo"]}
    reports["allreduce"]["rows"] = rows
    peers = {target.peer for target in targets.targets(reports)}
    assert peers == {"gloo", "private"}


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = importlib.import_module("plots")
    scaling = importlib.import_module("scaling_model")
    layers = importlib.import_module("layers")
    reports = made_up_reports()
    job = layers.Job((layers.Parameter(10**7, 1e9), layers.Parameter(10**7, 1e9)), 0.5)
    pascal = scaling.on_pascal(scaling.Link(2.5e9, 1e-5))
    reports["scaling_model"] = {
        "rows": [asdict(scaling.Cell(m, 16, 0.9, 0.91, 0.92)) for m in scaling.MODELS],
        "curves": [
            asdict(scaling.curve(cluster, model, job, variant, 0.02))
            for cluster in (pascal, scaling.A100, scaling.H100)
            for model in scaling.MODELS
            for variant in scaling.VARIANTS
        ],
    }
    for name, report in reports.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    files = plots.draw_all(tmp_path)
    assert {file.stem for file in files} == plots.FIGURES.keys() - {"hosts-3"}
    for file in files:
        assert file.read_bytes()[:4] == b"\x89PNG"
        assert 1000 < file.stat().st_size < 60_000
