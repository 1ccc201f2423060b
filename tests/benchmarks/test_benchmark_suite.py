"""The benchmark suite: its commands, its targets and its plots."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import suite
import targets


@pytest.mark.parametrize("name", suite.BENCHMARKS)
def test_commands_of_the_suite_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def made_up_row(
    collective: str, size_bytes: int, dtype: str, memory: str, **times_us: float
) -> Any:
    """Return a row as collectives.py writes it."""
    results = {
        library: {"time_us": time_us, "algbw": 1.0, "busbw": size_bytes / time_us / 1e3, "wrong": 0}
        for library, time_us in times_us.items()
    }
    ratios = {x: t / times_us["torch_ring"] for x, t in times_us.items() if x != "torch_ring"}
    facts = {"collective": collective, "bytes": size_bytes, "type": dtype, "memory": memory}
    return facts | {"results": results, "ratios": ratios}


def made_up_reports() -> dict[str, Any]:
    """Return reports from which every target can be calculated by hand."""
    machine = {"ranks": 2, "cores": 2}
    size_bytes = 64 << 20
    dtypes = ("float32", "bfloat16", "float16")
    peers = {"gloo": 200.0, "mpi": 50.0, "copy": 10.0, "touch": 12.0}
    peers |= {"prototype": 16.0}
    allreduce = [
        made_up_row("allreduce", size_bytes, dtype, memory, torch_ring=t, **peers)
        for dtype in dtypes
        for memory, t in (("private", 20.0), ("shared", 16.0))
    ]
    others = [
        made_up_row(
            collective, size_bytes, "float32", "private", torch_ring=10.0, gloo=60.0, **limit
        )
        for collective, limit in (
            ("allgather", {"touch": 7.5}),
            ("reducescatter", {}),
            ("broadcast", {}),
            ("alltoall", {}),
        )
    ]
    hosts = [made_up_row("allreduce", size_bytes, "float32", "private", torch_ring=1e5, gloo=1.6e5)]
    step = {"gradient_bytes": 4, "batch": 2, "efficiency_of_one": 0.9, "gradients_differ": 0.0}
    training = [
        step
        | {"model": "vgg16", "variant": v, "step_ms": 100.0, "exposed_ms": e, "efficiency": f}
        | {"beyond_ms": e - 2.0}
        for v, e, f in (("torch", 0, 1.0), ("torch_ring", 4.0, 0.96), ("ddp", 40.0, 0.7))
    ]
    in_training = [
        step
        | {"model": "resnet18", "variant": v, "step_ms": ms, "exposed_ms": 1.0, "beyond_ms": 1}
        | {"efficiency": 0.96}
        for v, ms in (("torch_ring", 100.0), ("ddp", 120.0), ("ddp_ring", 111.0))
    ]
    training += in_training
    sharded = [
        {"variant": v, "parameters": 4, "step_ms": 9.0, "communication_ms": 1.0, "of_gloo": of_gloo}
        for v, of_gloo in (("fake", 0.0), ("gloo", 1.0), ("ring", 0.4), ("ring_shared", 0.6))
    ]
    distributed = [
        made_up_row(collective, size, "float32", "private", torch_ring=8.0, gloo=gloo)
        | {"results": {"ring-c10d": {"time_us": 10.0}, "gloo": {"time_us": gloo}}}
        for collective, size, gloo in (
            ("allreduce", 1 << 10, 310.0),
            ("allreduce", 4 << 10, 1.0),
            ("allreduce", 64 << 10, 290.0),
            ("allreduce", 1 << 20, 80.0),
            ("allreduce", 64 << 20, 49.0),
            ("allgather", 16 << 20, 40.0),
            ("reducescatter", 16 << 20, 39.0),
        )
    ]
    overhead = [
        {"model": "500 parameters", "parameters": 500, "variant": v, "host_us": h}
        | {"collective_us": 1.0, "step_us": 1.0, "added_us": 1.0, "host_us_a_parameter": h / 500}
        for v, h in (("torch", 0.0), ("torch_ring", 90.0), ("ddp", 300.0))
    ]
    init = {"relative": 0.99, "control": 1.0, "control_quartiles": [0.98, 1.02]}
    inits = [
        {"ranks": ranks, "hosts": hosts, "library": library, "seconds": seconds, "ratio": ratio}
        for ranks, hosts, library, seconds, ratio in (
            (2, 1, "torch_ring", 0.1, None),
            (2, 1, "gloo", 0.3, 3.0),
            (128, 1, "torch_ring", 4.0, None),
            (128, 1, "gloo", 8.0, 2.0),
            (512, 1, "torch_ring", 12.0, None),
            (512, 1, "gloo", None, None),
            (32, 4, "torch_ring", 2.0, None),
            (32, 4, "gloo", 1.0, 0.5),
        )
    ]
    death = {"ranks": 128, "hosts": 16, "victim": 0, "slowest_ms": 700.0}
    recovery = [
        {"what": what, "ranks": 4, "hosts": hosts, "median_ms": ms}
        for what, hosts, ms in (("killed: any", 1, 50.0), ("cut off", 2, 400.0), ("state", 1, 30.0))
    ]
    jobs = [
        {"launcher": launcher, "whole_s": whole_s, "steps_s": [-1.0, -0.9, whole_s, whole_s + 0.1]}
        for launcher, whole_s in (("torch_ring, standby", 0.5), ("torchrun", 9.0))
    ]
    sets = {"sets": 500, "seconds": 6.0, "kib": 512.0}
    return {
        "init_scale": {"machine": machine, "rows": inits},
        "recovery": {"machine": machine, "rows": recovery, "jobs": jobs},
        "death": {"machine": machine, "rows": [death, death | {"slowest_ms": None}]},
        "sets": {"machine": machine, "rows": [sets, sets | {"seconds": None, "kib": None}]},
        "allreduce": {"machine": machine, "rows": allreduce},
        "collectives": {"machine": machine, "rows": others},
        "hosts-2": {
            "machine": machine,
            "rows": hosts,
            "traffic": {"tool": "iperf3", "before_gb_per_s": 0.5, "after_gb_per_s": 0.7},
        },
        "training_step": {"machine": machine, "rows": training},
        "training_step-2-hosts": {"machine": machine, "rows": in_training[:2]},
        "sharded_step": {"machine": machine, "rows": sharded},
        "sharded_step-2-hosts": {"machine": machine, "rows": sharded},
        "distributed": {"machine": machine, "rows": distributed},
        "overhead": {"machine": machine, "rows": overhead, "init": init},
    }


def test_targets_of_all_results() -> None:
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
    assert found[("init(), one host, worst: 128 ranks", "gloo")] == (2, True)
    assert found[("init(), many hosts, worst: 32 ranks", "gloo")] == (0.5, False)
    assert found[("init() of 128 ranks (s)", "")] == (4, False)
    assert found[("init() of 512 ranks (s)", "")] == (12, True)
    assert found[("rank 0 of 128, 16 hosts, killed: known (s)", "")] == (0.7, True)
    assert found[("4 ranks, killed: any: train on (ms)", "")] == (50, True)
    assert found[("4 ranks, cut off: train on (ms)", "")] == (400, False)
    assert found[("a standby process trains (s)", "")] == (0.5, True)
    assert found[("500 process sets: made (s)", "")] == (6, False)
    assert found[("500 process sets: MB of an idle one", "")] == (0.5, True)
    assert found[("torch.distributed, allreduce 1 KB", "gloo")] == (31, True)
    assert found[("torch.distributed, allreduce 64 KB", "gloo")] == (29, False)
    assert found[("torch.distributed, allreduce 1 MB", "gloo")] == (8, True)
    assert found[("torch.distributed, allreduce 64 MB", "gloo")] == (4.9, False)
    assert found[("torch.distributed, allgather 16 MB", "gloo")] == (4, True)
    assert found[("torch.distributed, reducescatter 16 MB", "gloo")] == (3.9, False)
    assert found[("resnet18: DDP's step over ring", "our optimizer's")] == (1.11, False)
    assert found[("FSDP2's communication over ring", "gloo's")] == (0.4, True)
    assert found[("2 hosts, FSDP2's communication over ring", "gloo's")] == (0.4, True)
    verdicts = {(t.what, t.peer): t.verdict for t in targets.targets(made_up_reports())}
    assert {key for key, verdict in verdicts.items() if verdict} == {
        key for key, (_, met) in found.items() if not met
    }
    # The prototype takes 16 of the 12.5 us that four times Open MPI's speed would be.
    assert verdicts[("allreduce 64 MB", "Open MPI")] == "out of reach"
    assert verdicts[("alltoall, worst: 64 MB", "gloo")] == "missed"  # `touch` was not measured
    limits = {(t.what, t.peer): t.limit for t in targets.targets(made_up_reports())}
    assert limits[("allgather, worst: 64 MB", "gloo")] == 8  # where there is only `touch`
    assert limits[("allreduce 64 MB, shared", "private")] == 2  # 20 us, and `copy` takes 10
    assert limits[("2 hosts, allreduce, worst: 64 MB", "gloo")] == pytest.approx(1.6 / share)
    lines = list(targets.table(targets.targets(made_up_reports())))
    assert [line.split()[-1] for line in lines if "Open MPI" in line] == ["reach"]
    assert list(targets.targets({})) == []


def test_targets_of_a_part_of_the_results() -> None:
    """Results of one dtype beside one peer give the targets that need no more."""
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
    assert {file.stem for file in files} == plots.FIGURES.keys() - {"hosts-3"} | {"overview"}
    for file in files:
        assert file.read_bytes()[:4] == b"\x89PNG"
        assert 1000 < file.stat().st_size < 60_000
