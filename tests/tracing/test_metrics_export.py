# SPDX-License-Identifier: Apache-2.0
"""Counters: snapshot(), files and ports for Prometheus, the callbacks of docs/tracing.md."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, eventually, has_asked, run
from ports import free_ports
from scripts import ROOT
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring import tracing
from torch_ring.tracing import exporter, snapshot
from torch_ring.tracing.counters import MessageCounts
from torch_ring.world import current

LONG = 100_000  # elements: too long to be sent before there is a receive


@on_ranks(2)
def test_memory() -> None:
    before = snapshot().memory
    shared = hvd.empty_shared(1 << 20)
    assert snapshot().memory.shared_bytes >= before.shared_bytes + (4 << 20)
    del shared
    assert snapshot().memory.shared_bytes == before.shared_bytes
    result = hvd.allreduce(torch.ones(2 << 20), name="large")  # 8 MiB: of the pool
    in_use = snapshot().memory.kept_result_bytes
    del result
    assert snapshot().memory.kept_result_bytes >= in_use + (8 << 20)
    model = torch.nn.Linear(300, 200)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert snapshot().memory.kept_gradient_bytes >= 300 * 200 * 4


parser = pytest.importorskip("prometheus_client.parser")
utils = pytest.importorskip("prometheus_client.utils")

DEADLINE_S = 30.0

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> tuple[Samples, dict[str, str]]:
    """Return the samples by name and labels, and the types of the metrics by name."""
    families = list(parser.text_string_to_metric_families(text))
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    return samples, {family.name: family.type for family in families}


def value(samples: Samples, name: str, **labels: object) -> float:
    return samples[name, tuple(sorted((key, str(each)) for key, each in labels.items()))]


def use_everything(asked: Path) -> tracing.Snapshot:
    hvd.init()
    before = tracing.snapshot()
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 1:  # late for the first operation
        assert eventually(lambda: len(list(asked.iterdir())) == 2)
        time.sleep(0.1)
    else:
        tell = (asked / str(hvd.rank())).touch
        threading.Thread(target=lambda: eventually(has_asked) and tell()).start()
    for count in (1000, 1000, LONG):
        hvd.allreduce(torch.ones(count), name="a")
    if pair.included():
        hvd.allreduce(torch.ones(10), name="in the pair", process_set=pair)
    with pytest.raises(hvd.MismatchError):
        hvd.broadcast(torch.ones(3 + hvd.rank()), 0, name="b")
    engine = current.engine()
    if hvd.rank() == 0:
        engine.send(torch.ones(25), 1).wait()
        assert error_of(engine.send(torch.ones(LONG), 1, 1).wait)[0] == "MismatchError"
    elif hvd.rank() == 1:
        engine.receive(torch.ones(25), 0).wait()
        too_short = engine.receive(torch.ones(5), 0, 1)
        assert error_of(too_short.wait)[0] == "MismatchError"
    found = tracing.snapshot()
    assert (found.rank, found.size, found.sets[0].ranks) == (hvd.rank(), 3, (0, 1, 2))
    assert found.sets[0].rounds >= before.sets[0].rounds + 4
    hvd.shutdown()
    return found


def check(found: tracing.Snapshot) -> None:
    """Check a snapshot of `use_everything`."""
    its = found.sets[0]
    reduced = its.operations["allreduce"]
    assert (reduced.operations, reduced.failed, reduced.bytes) == (3, 0, 8000 + 4 * LONG)
    assert 0 < reduced.running_s < 3600
    assert (0.05 if found.rank != 1 else 0) < reduced.waiting_s < 3600  # and not nanoseconds
    assert its.operations["broadcast"].failed == 1
    assert its.inlined >= 2
    assert its.fused == 0
    none, some = MessageCounts(0, 0, 0), MessageCounts(2, 1, 100)
    assert its.messages["sent"] == (some if found.rank == 0 else none)
    assert its.messages["received"] == (some if found.rank == 1 else none)
    assert (1 in found.sets) == (found.rank < 2)
    lag = its.lag
    assert len(lag.counts) == len(lag.bounds_s) + 1
    assert sum(lag.counts) == sum(each.operations for each in its.operations.values())
    waits = sum(n for n, bound in zip(lag.counts[1:], lag.bounds_s, strict=True) if bound >= 0.05)
    assert (waits >= 1 and lag.sum_s > 0.05) if found.rank != 1 else True


def expected_samples(found: tracing.Snapshot) -> dict[str, float]:
    """Return the samples of a snapshot, by the text of name and labels."""
    expected: dict[str, float] = {
        f"torch_ring_world_size rank={found.rank}": 3,
        f"torch_ring_data_connections_total rank={found.rank}": found.connections,
    }
    for number, its in found.sets.items():
        labels = f"process_set={number} rank={found.rank}"
        for operation, counts in its.operations.items():
            for metric, wanted in (
                ("operations", counts.operations),
                ("failed_operations", counts.failed),
                ("operation_bytes", counts.bytes),
                ("operation_running_seconds", counts.running_s),
                ("operation_waiting_seconds", counts.waiting_s),
            ):
                expected[f"torch_ring_{metric}_total operation={operation} {labels}"] = wanted
        for way, messages in its.messages.items():
            for metric, wanted in (
                ("messages", messages.messages),
                ("failed_messages", messages.failed),
                ("message_bytes", messages.bytes),
            ):
                expected[f"torch_ring_{metric}_total direction={way} {labels}"] = wanted
        expected[f"torch_ring_inline_operations_total {labels}"] = its.inlined
        expected[f"torch_ring_fused_operations_total {labels}"] = its.fused
        lag = "torch_ring_arrival_lag_seconds"
        bounds = [*map(utils.floatToGoString, its.lag.bounds_s), "+Inf"]
        for bound, count in zip(bounds, accumulate(its.lag.counts), strict=True):
            expected[f"{lag}_bucket le={bound} {labels}"] = count
        expected[f"{lag}_count {labels}"] = sum(its.lag.counts)
        expected[f"{lag}_sum {labels}"] = its.lag.sum_s
    return expected


@on_both_transports
def test_each_rank_writes_its_snapshot_to_a_file(tmp_path: Path, transport: str) -> None:
    env = {"TORCH_RING_METRICS_FILE": str(tmp_path / "torch_ring.prom")}
    asked = tmp_path / "asked"
    asked.mkdir()
    snapshots = run(
        use_everything, 3, initialized=False, transport=transport, env=env, args=(asked,)
    )
    names = [f"torch_ring.rank{rank}.prom" for rank in range(3)]
    assert sorted(path.name for path in tmp_path.glob("*.prom")) == names
    for rank, (name, found) in enumerate(zip(names, snapshots, strict=True)):
        samples, types = parsed((tmp_path / name).read_text())
        check(found)
        texts = {
            " ".join([metric, *(f"{label}={each}" for label, each in labels)]): number
            for (metric, labels), number in samples.items()
        }
        expected = expected_samples(found)
        assert {text: texts.get(text) for text in expected} == expected
        if rank == 2:  # messages take connections on shared memory, too
            assert (found.connections > 0) == (transport == "tcp")
        assert types["torch_ring_arrival_lag_seconds"] == "histogram"
        assert types["torch_ring_operations"] == "counter"
        assert types["torch_ring_shared_memory_bytes"] == "gauge"
        page = (ROOT / "docs" / "tracing.md").read_text()
        suffix = {"counter": "_total"}
        assert set(re.findall(r"`(torch_ring_\w+)`", page)) == {
            name + suffix.get(kind, "") for name, kind in types.items()
        }


def test_where_a_rank_writes() -> None:
    assert exporter.path_of_rank("/a/b.prom", 3) == Path("/a/b.rank3.prom")
    assert exporter.path_of_rank("b", 3) == Path("b.rank3")
    assert exporter.path_of_rank("/a{rank}/b-{rank}.prom", 12) == Path("/a12/b-12.prom")


def get(port: int, address: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def write_and_serve(folder: str, first_port: int) -> None:
    exporter.INTERVAL_S = 0.1
    hvd.init()
    hvd.allreduce(torch.ones(10), name="a")
    file, port = Path(folder) / f"of-{hvd.rank()}.prom", first_port + hvd.local_rank()
    labels = {"rank": hvd.rank(), "process_set": 0, "operation": "allreduce"}
    samples, _ = parsed(get(port))
    assert value(samples, "torch_ring_operation_bytes_total", **labels) == 40
    assert error_of(lambda: get(port, "127.0.0.2"))[0] == "URLError"  # not on other addresses
    written = set()

    def is_written_anew() -> bool:
        samples, _ = parsed(file.read_text())  # always a complete file
        assert value(samples, "torch_ring_world_size", rank=hvd.rank()) == 2
        if "torch_ring_operations_total" in {name for name, _ in samples}:
            written.add(file.stat().st_mtime_ns)
        return len(written) >= 3

    assert eventually(is_written_anew, DEADLINE_S)
    hvd.barrier()
    hvd.shutdown()
    assert error_of(lambda: get(port))[0] == "URLError"


def test_each_rank_writes_again_and_again_and_serves_on_a_port_of_its_own(tmp_path: Path) -> None:
    port = free_ports(2)
    env = {
        "TORCH_RING_METRICS_FILE": str(tmp_path / "of-{rank}.prom"),
        "TORCH_RING_METRICS_PORT": str(port),
    }
    run(write_and_serve, 2, initialized=False, args=(str(tmp_path), port), env=env)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of-0.prom", "of-1.prom"]


def init_fails() -> tuple[str, str]:
    error = error_of(hvd.init)
    assert not hvd.is_initialized()
    return error


def train_and_die() -> int:
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    name = hvd.rank()

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, 6):
            optimizer.zero_grad()
            if (name, state.step) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        state.step = 6

    train(state)
    return hvd.rank()


def test_elastic_training_goes_on_to_write(tmp_path: Path) -> None:
    env = {"TORCH_RING_METRICS_FILE": str(tmp_path / "a.prom")}
    results = run(train_and_die, 3, transport="tcp", env=env, may_die=[1])
    assert results == [0, None, 1]
    # Rank 2 has taken the place of rank 1, whose process is dead.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.rank0.prom", "a.rank1.prom"]
    for rank in range(2):
        samples, _ = parsed((tmp_path / f"a.rank{rank}.prom").read_text())
        assert value(samples, "torch_ring_world_size", rank=rank) == 2


def init_without_the_library() -> tuple[str, str]:
    if os.environ["RANK"] == "1":
        sys.modules["prometheus_client"] = None  # type: ignore[assignment]
    return init_fails()


def test_an_export_that_cannot_be_had_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    port = free_ports(2)
    taken = f"={port}: local rank 1 cannot serve at 127.0.0.1:{port + 1}: [Errno 98] Address"
    no_port = "127.0.0.1:65536: bind(): port must be 0-65535"
    no_file = ": cannot write /nowhere/torch_ring.rank"
    no_library = " is set, but prometheus_client"
    with socket.create_server(("127.0.0.1", port + 1)):
        for call, name, setting, words in (
            (init_fails, "PORT", str(port), taken),
            (init_fails, "PORT", "65535", no_port),
            (init_fails, "FILE", "/nowhere/torch_ring.prom", no_file),
            (init_without_the_library, "FILE", str(tmp_path / "a.prom"), no_library),
            (init_without_the_library, "PORT", str(free_ports(2)), no_library),
        ):
            env = {f"TORCH_RING_METRICS_{name}": setting}
            errors = run(call, 2, initialized=False, env=env)
            for _, text in errors:
                assert f"TORCH_RING_METRICS_{name}" in text
                assert words in text


# --- lifetimes


def fork_a_child(file: str, port: int) -> None:
    hvd.init()
    told, tell = os.pipe()
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)  # until the parent has left its world
        hvd.shutdown()
        os.write(say, b"x")
        os.read(told, 1)  # until the parent has seen enough
        os._exit(0)
    os.close(told)
    hvd.shutdown()
    assert error_of(lambda: get(port))[0] == "URLError"  # the child does not keep it
    before = Path(file).stat()
    os.write(tell, b"x")
    os.read(said, 1)
    after = Path(file).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    os.close(tell)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_neither_writes_nor_serves(tmp_path: Path) -> None:
    port = free_ports(2)
    env = {
        "TORCH_RING_METRICS_FILE": str(tmp_path / "a.prom"),
        "TORCH_RING_METRICS_PORT": str(port),
    }
    file = str(tmp_path / "a.rank0.prom")
    run(fork_a_child, 1, initialized=False, args=(file, port), env=env)


@on_ranks(1, initialized=False)
def test_a_process_removes_its_earlier_file_and_no_other(tmp_path) -> None:
    folder = str(tmp_path)

    def write(name: str) -> None:
        os.environ["TORCH_RING_METRICS_FILE"] = f"{folder}/{name}"
        hvd.init()
        hvd.shutdown()

    write("a-{rank}")
    write("b-{rank}")
    assert os.listdir(folder) == ["b-0"]
    shutil.copy(f"{folder}/b-0", f"{folder}/new")
    os.replace(f"{folder}/new", f"{folder}/b-0")  # as another rank does that has this name now
    write("c-{rank}")
    assert sorted(os.listdir(folder)) == ["b-0", "c-0"]
    child = os.fork()
    if child == 0:
        try:
            write("d-{rank}")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(os.listdir(folder)) == ["b-0", "c-0", "d-0"]


def begin_as_a_newcomer() -> None:
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # torch_ring.run takes it from its processes
    hvd.init()
    hvd.shutdown()


def test_a_newcomer_that_is_not_in_the_job_yet_touches_no_file_of_it(tmp_path: Path) -> None:
    env = {
        "TORCH_RING_METRICS_FILE": str(tmp_path / "a.prom"),
        "TORCH_RING_TIMELINE": str(tmp_path / "a.json"),
        "TORCH_RING_ELASTIC_NEWCOMER": "1",
    }
    run(begin_as_a_newcomer, 1, initialized=False, env=env)
    assert list(tmp_path.iterdir()) == []


def class_of(name: str) -> Any:
    """Return a class of the page."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tracing.md").read_text(), re.S)
    (code,) = [block for block in blocks if f"class {name}" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    return names[name]


class StandInRun:
    """Accepts the calls of a wandb run."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))


def call_both(folder: str) -> None:
    wandb = types.SimpleNamespace(init=StandInRun)
    with mock.patch.dict(sys.modules, {"wandb": wandb}):  # type: ignore[dict-item]
        to_wandb = class_of("WandbCallback")(project="p")
    to_tensorboard = class_of("TensorBoardCallback")(f"{folder}/rank{hvd.rank()}")
    for step in range(2):
        hvd.allreduce(torch.ones(1000), name="a")
        to_wandb(step)
        to_tensorboard(step)
    to_tensorboard.writer.close()
    assert to_wandb.run.options == {"project": "p"}
    sent = [(step, values["torch_ring/allreduce/bytes"]) for step, values in to_wandb.run.logged]
    assert sent == [(0, 4000), (1, 8000)]


def test_the_callbacks_of_the_page(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(call_both, 2, args=(str(tmp_path),))
    for rank in range(2):
        found = events.EventAccumulator(str(tmp_path / f"rank{rank}"))
        found.Reload()
        assert "torch_ring/arrival_lag_s" in found.Tags()["scalars"]
        sent = found.Scalars("torch_ring/allreduce/bytes")
        assert [(each.step, each.value) for each in sent] == [(0, 4000), (1, 8000)]
