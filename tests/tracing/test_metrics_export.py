"""Counters for Prometheus: files and ports of real ranks, read by Prometheus' own parser."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import error_of, eventually, run
from ports import free_ports
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.tracing import exporter
from torch_ring.world import current

parser = pytest.importorskip("prometheus_client.parser")

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


def reduce_some() -> None:
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    for _ in range(3):
        hvd.allreduce(torch.ones(1000), name="a")
    if pair.included():
        hvd.allreduce(torch.ones(10), name="in the pair", process_set=pair)
    with pytest.raises(hvd.MismatchError):
        hvd.broadcast(torch.ones(3 + hvd.rank()), 0, name="b")
    hvd.shutdown()


def send_one() -> None:
    hvd.init()
    if hvd.rank() == 0:
        current.engine().send(torch.ones(25), 1).wait()
    else:
        current.engine().receive(torch.ones(25), 0).wait()
    hvd.shutdown()


def test_messages_are_counted(tmp_path: Path) -> None:
    env = {"TORCH_RING_METRICS_FILE": str(tmp_path / "torch_ring.prom")}
    run(send_one, 2, initialized=False, env=env)
    for rank, its_way in enumerate(("sent", "received")):
        samples, _ = parsed((tmp_path / f"torch_ring.rank{rank}.prom").read_text())
        for way in ("sent", "received"):
            labels = {"rank": rank, "process_set": 0, "direction": way}
            assert value(samples, "torch_ring_messages_total", **labels) == (way == its_way)
            assert value(samples, "torch_ring_failed_messages_total", **labels) == 0
            assert value(samples, "torch_ring_message_bytes_total", **labels) == (
                100 if way == its_way else 0
            )


@on_both_transports
def test_each_rank_writes_a_file(tmp_path: Path, transport: str) -> None:
    env = {"TORCH_RING_METRICS_FILE": str(tmp_path / "torch_ring.prom")}
    run(reduce_some, 3, initialized=False, transport=transport, env=env)
    names = [f"torch_ring.rank{rank}.prom" for rank in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for rank, name in enumerate(names):
        samples, types = parsed((tmp_path / name).read_text())
        of_set = {"rank": rank, "process_set": 0}
        reduced = {**of_set, "operation": "allreduce"}
        assert value(samples, "torch_ring_operations_total", **reduced) == 3
        assert value(samples, "torch_ring_failed_operations_total", **reduced) == 0
        assert value(samples, "torch_ring_operation_bytes_total", **reduced) == 12_000
        assert value(samples, "torch_ring_operation_running_seconds_total", **reduced) > 0
        assert value(samples, "torch_ring_operation_waiting_seconds_total", **reduced) > 0
        sent = {**of_set, "operation": "broadcast"}
        assert value(samples, "torch_ring_failed_operations_total", **sent) == 1
        assert value(samples, "torch_ring_inline_operations_total", **of_set) >= 3
        assert value(samples, "torch_ring_fused_operations_total", **of_set) == 0
        assert value(samples, "torch_ring_world_size", rank=rank) == 3
        assert (value(samples, "torch_ring_data_connections_total", rank=rank) > 0) == (
            transport == "tcp"
        )
        ended = sum(
            number
            for (sample, labels), number in samples.items()
            if sample == "torch_ring_operations_total" and ("process_set", "0") in labels
        )
        assert value(samples, "torch_ring_agreement_rounds_total", **of_set) >= 5
        buckets = [
            (dict(labels)["le"], number)
            for (sample, labels), number in samples.items()
            if sample == "torch_ring_arrival_lag_seconds_bucket" and ("process_set", "0") in labels
        ]
        bounds = [float(bound) for bound, _ in buckets]
        assert bounds == sorted(bounds)
        assert bounds[-1] == float("inf")
        counts = [number for _, number in buckets]
        assert counts == sorted(counts)
        assert counts[-1] == value(samples, "torch_ring_arrival_lag_seconds_count", **of_set)
        assert counts[-1] == ended
        assert value(samples, "torch_ring_arrival_lag_seconds_sum", **of_set) > 0
        in_pair = (("operation", "allreduce"), ("process_set", "1"), ("rank", str(rank)))
        assert (("torch_ring_operations_total", in_pair) in samples) == (rank < 2)
        assert types["torch_ring_arrival_lag_seconds"] == "histogram"
        assert types["torch_ring_operations"] == "counter"
        assert types["torch_ring_shared_memory_bytes"] == "gauge"


def test_where_a_rank_writes() -> None:
    assert exporter.path_of_rank("/a/b.prom", 3) == Path("/a/b.rank3.prom")
    assert exporter.path_of_rank("b", 3) == Path("b.rank3")
    assert exporter.path_of_rank("/a{rank}/b-{rank}.prom", 12) == Path("/a12/b-12.prom")


def write_while_it_runs(folder: str) -> None:
    exporter.INTERVAL_S = 0.1
    hvd.init()
    hvd.allreduce(torch.ones(10), name="a")
    file = Path(folder) / f"of-{hvd.rank()}.prom"
    written = set()

    def is_written_anew() -> bool:
        samples, _ = parsed(file.read_text())  # always a complete file
        assert value(samples, "torch_ring_world_size", rank=hvd.rank()) == 2
        labels = {"rank": hvd.rank(), "process_set": 0, "operation": "allreduce"}
        key = ("torch_ring_operations_total", tuple(sorted((k, str(v)) for k, v in labels.items())))
        if samples.get(key) == 1:
            written.add(file.stat().st_mtime_ns)
        return len(written) >= 3

    assert eventually(is_written_anew, DEADLINE_S)
    hvd.barrier()
    hvd.shutdown()


def test_the_file_is_written_again_and_again_and_is_always_whole(tmp_path: Path) -> None:
    env = {"TORCH_RING_METRICS_FILE": str(tmp_path / "of-{rank}.prom")}
    run(write_while_it_runs, 2, initialized=False, args=(str(tmp_path),), env=env)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of-0.prom", "of-1.prom"]


# --- the port


def get(port: int, address: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def serve(first_port: int) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(1000), name="a")
    port = first_port + hvd.local_rank()
    samples, types = parsed(get(port))
    labels = {"rank": hvd.rank(), "process_set": 0, "operation": "allreduce"}
    assert value(samples, "torch_ring_operation_bytes_total", **labels) == 4000
    assert types["torch_ring_arrival_lag_seconds"] == "histogram"
    assert error_of(lambda: get(port, "127.0.0.2"))[0] == "URLError"  # not on other addresses
    hvd.barrier()
    hvd.shutdown()
    assert error_of(lambda: get(port))[0] == "URLError"


def test_each_rank_serves_on_a_port_of_its_own() -> None:
    port = free_ports(2)
    env = {"TORCH_RING_METRICS_PORT": str(port)}
    run(serve, 2, initialized=False, args=(port,), env=env)


def init_fails() -> tuple[str, str]:
    error = error_of(hvd.init)
    assert not hvd.is_initialized()
    return error


@on_both_transports
def test_a_port_that_is_taken_is_an_error_on_all_ranks(transport: str) -> None:
    port = free_ports(2)
    env = {"TORCH_RING_METRICS_PORT": str(port)}
    with socket.create_server(("127.0.0.1", port + 1)):
        errors = run(init_fails, 2, initialized=False, transport=transport, env=env)
    assert [kind for kind, _ in errors] == ["RingError", "InvalidArgumentError"]
    for _, text in errors:
        assert f"TORCH_RING_METRICS_PORT={port}: local rank 1 cannot serve" in text
        assert f"127.0.0.1:{port + 1}: [Errno 98] Address already in use" in text


def test_a_port_that_cannot_be_is_an_error_on_all_ranks() -> None:
    errors = run(init_fails, 2, initialized=False, env={"TORCH_RING_METRICS_PORT": "65535"})
    for _, text in errors:
        assert "127.0.0.1:65536: bind(): port must be 0-65535" in text


@on_both_transports
def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(transport: str) -> None:
    env = {"TORCH_RING_METRICS_FILE": "/nowhere/torch_ring.prom"}
    for kind, text in run(init_fails, 3, initialized=False, transport=transport, env=env):
        assert kind in ("InvalidArgumentError", "RingError")
        assert "TORCH_RING_METRICS_FILE: cannot write /nowhere/torch_ring.rank" in text
        assert "No such file or directory" in text


def init_without_the_library() -> tuple[str, str]:
    if os.environ["RANK"] == "1":
        sys.modules["prometheus_client"] = None  # type: ignore[assignment]
    return init_fails()


@pytest.mark.parametrize("variable", ["TORCH_RING_METRICS_FILE", "TORCH_RING_METRICS_PORT"])
def test_a_library_that_is_missing_is_an_error_on_all_ranks(tmp_path: Path, variable: str) -> None:
    setting = str(tmp_path / "a.prom") if variable.endswith("FILE") else str(free_ports(2))
    errors = run(init_without_the_library, 2, initialized=False, env={variable: setting})
    for _, text in errors:
        assert f"{variable} is set, but prometheus_client" in text
        assert "pip install 'torch_ring[metrics]'" in text


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


def init_again(port: int) -> list[str]:
    hvd.init()
    hvd.shutdown()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_ring").addHandler(handler)
    with socket.create_server(("127.0.0.1", port)):
        hvd.init()
        for _ in range(2):
            hvd.allreduce(torch.ones(10), name="again")
        hvd.shutdown()
    return warnings


def test_a_job_that_goes_on_does_not_end_for_it(tmp_path: Path) -> None:
    port = free_ports(2)
    env = {
        "TORCH_RING_METRICS_FILE": str(tmp_path / "a.prom"),
        "TORCH_RING_METRICS_PORT": str(port),
    }
    (warnings,) = run(init_again, 1, initialized=False, args=(port,), env=env)
    assert any(f"TORCH_RING_METRICS_PORT={port}" in text for text in warnings), warnings
    samples, _ = parsed((tmp_path / "a.rank0.prom").read_text())
    labels = {"rank": 0, "process_set": 0, "operation": "allreduce"}
    assert value(samples, "torch_ring_operations_total", **labels) == 2  # of the second world


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


@on_both_transports
def test_elastic_training_goes_on_to_write(tmp_path: Path, transport: str) -> None:
    env = {"TORCH_RING_METRICS_FILE": str(tmp_path / "a.prom")}
    results = run(train_and_die, 3, transport=transport, env=env, may_die=[1])
    assert results == [0, None, 1]
    # Rank 2 has taken the place of rank 1, whose process is dead.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.rank0.prom", "a.rank1.prom"]
    for rank in range(2):
        samples, _ = parsed((tmp_path / f"a.rank{rank}.prom").read_text())
        assert value(samples, "torch_ring_world_size", rank=rank) == 2


def change_names(folder: str) -> None:
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


def test_a_process_removes_its_earlier_file_and_no_other(tmp_path: Path) -> None:
    run(change_names, 1, initialized=False, args=(str(tmp_path),))


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
