# SPDX-License-Identifier: Apache-2.0
"""The timeline of a job, for every way to start or end it, and the spans in torch.profiler."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import all_have_passed, error_of, eventually, run

import torch_ring as hvd
from tests.support.groups import on_ring
from torch_ring.tracing.page.analysis import step_times
from torch_ring.tracing.page.recording import read_recording

DEADLINE_S = 30.0


def read(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())
    assert all({"name", "ph", "pid"} <= event.keys() for event in events)
    return events


def names_of(events: list[dict[str, Any]], rank: int) -> Counter[str]:
    return Counter(event["name"] for event in events if event["pid"] == rank + 1)


def tensors_of(events: list[dict[str, Any]], rank: int, name: str = "ALLREDUCE") -> list[str]:
    chosen = [event for event in events if event["pid"] == rank + 1 and event["name"] == name]
    return [event["args"]["tensor"].removeprefix(f"{name.lower()}.") for event in chosen]


def reduce_some() -> None:
    hvd.init()
    for i in range(3):
        hvd.allreduce(torch.ones(2000), name=f"tensor {i}")
    hvd.broadcast(torch.ones(5), root_rank=0, name="sent")
    order = range(12) if hvd.rank() == 0 else reversed(range(12))
    handles = [hvd.allreduce_async(torch.ones(9000 + i), name=f"in flight {i}") for i in order]
    for handle in handles:
        hvd.synchronize(handle)
    hvd.shutdown()


@pytest.fixture(scope="module", params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def events(transport: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the timeline of three ranks, which Horovod's variables have asked for."""
    file = tmp_path_factory.mktemp("timeline") / "timeline.json"
    variables = {"HOROVOD_TIMELINE": str(file), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    run(reduce_some, 3, transport=transport, initialized=False, env=variables)
    return read(file)


def test_a_file_of_all_ranks(events: list[dict[str, Any]], transport: str) -> None:
    assert "start_time_since_epoch_in_micros" in events[0]["args"]
    numbers = []
    for rank in range(3):
        names = names_of(events, rank)
        assert names["NEGOTIATE_ALLREDUCE"] == names["ALLREDUCE"] == 15
        assert names["NEGOTIATE_BROADCAST"] == names["BROADCAST"] == 1
        assert names["CYCLE_START"] >= 4
        assert names["MEMCPY_IN_FUSION_BUFFER"] == names["MEMCPY_OUT_FUSION_BUFFER"] >= 2
        assert tensors_of(events, rank)[:3] == ["tensor 0", "tensor 1", "tensor 2"]
        mine = [e["args"] for e in events if (e["pid"], e["name"]) == (rank + 1, "ALLREDUCE")]
        numbers.append({each["tensor"]: each["sequence"] for each in mine})
    assert len(set(numbers[0].values())) == len(numbers[0]) == 15
    assert numbers[0] == numbers[1] == numbers[2]

    name = "allreduce.tensor 1"
    mine = [e for e in events if e["pid"] == 2 and e.get("args", {}).get("tensor") == name]
    wait, operation = sorted(mine, key=lambda event: event["name"], reverse=True)[:2]
    assert (wait["name"], operation["name"]) == ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")
    assert wait["ts"] + wait["dur"] == pytest.approx(operation["ts"], abs=0.01)
    args = operation["args"]
    assert (args["bytes"], args["dtype"], args["process_set"]) == (8000, "float32", 0)
    assert args["transport"] == transport
    assert operation["ts"] <= args["started"] <= operation["ts"] + operation["dur"]


def test_perfetto_shows_every_span(events: list[dict[str, Any]]) -> None:
    """Perfetto takes process and thread 0 for the kernel's idle task, and drops crossing spans."""
    assert {event["pid"] for event in events} == {1, 2, 3}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            threads.setdefault((event["pid"], event["tid"]), []).append(span)
    assert all(thread > 0 for _, thread in threads)
    assert max(thread for _, thread in threads) > 1  # operations that overlap
    for spans in threads.values():
        around: list[float] = []  # the ends of the spans around this one
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= begin + 0.0011:  # microseconds have three digits
                around.pop()
            assert not around or end <= around[-1] + 0.0011
            around.append(end)


def start_in_the_middle(folder: str) -> None:
    hvd.init(process_sets=[hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])])
    hvd.allreduce(torch.ones(3000), name="before")
    for part, mark_cycles in (("first", False), ("second", True)):
        hvd.start_timeline(Path(folder) / f"{part}.json", mark_cycles=mark_cycles)
        hvd.allreduce(torch.ones(3000), name=f"during {part}")
        pair = hvd.add_process_set([0, 2])
        if pair.included():
            hvd.allreduce(torch.ones(9), name="in the pair", process_set=pair)
        hvd.remove_process_set(pair)
        hvd.stop_timeline()
        hvd.barrier()
        hvd.allreduce(torch.ones(3000), name=f"after {part}")
    hvd.stop_timeline()  # there is none
    hvd.shutdown()


def test_a_timeline_of_a_part_of_the_job(tmp_path: Path) -> None:
    env = {"HOROVOD_TIMELINE": "DYNAMIC"}
    run(start_in_the_middle, 3, initialized=False, args=(str(tmp_path),), env=env)
    for part, has_cycles in (("first", False), ("second", True)):
        events = read(tmp_path / f"{part}.json")
        for rank in range(3):
            expected = [f"during {part}", *(["in the pair"] if rank != 1 else [])]
            assert tensors_of(events, rank) == expected
            assert (names_of(events, rank)["CYCLE_START"] > 0) == has_cycles
        pair = [e for e in events if e.get("args", {}).get("tensor") == "allreduce.in the pair"]
        assert len({event["args"]["process_set"] for event in pair}) == 1
        assert pair[0]["args"]["process_set"] != 0


def has_written_own(file: Path, tensor: str) -> bool:
    """Return whether rank 0's records, which its own thread writes, are in the file."""
    with contextlib.suppress(json.JSONDecodeError):  # read during a write
        return tensor in tensors_of(read(file), 0)
    return False


def killed(file: str) -> None:
    hvd.init()
    hvd.start_timeline(file)
    for i in range(20):
        hvd.allreduce(torch.ones(3000), name=f"tensor {i}")
    all_have_passed(Path(file).with_name("passed"), hvd.size())
    if hvd.rank() == 0:
        assert eventually(lambda: has_written_own(Path(file), "tensor 19"), DEADLINE_S)
        os.kill(os.getpid(), signal.SIGKILL)
    assert error_of(lambda: hvd.allreduce(torch.ones(3)))[0] == "PeerLostError"
    hvd.shutdown()


def test_the_file_is_whole_after_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    run(killed, 2, initialized=False, args=(str(file),), may_die=[0])
    assert tensors_of(read(file), 0)[-1] == "tensor 19"


def one_is_wrong(file: str) -> None:
    hvd.init()
    wrong = ("InvalidArgumentError", "file_path='' is not the path of a file")
    assert error_of(lambda: hvd.start_timeline("")) == wrong
    kind, text = error_of(lambda: hvd.start_timeline("/nowhere/timeline.json"))
    assert kind == "InvalidArgumentError"
    assert "/nowhere/timeline.json: No such file or directory" in text
    assert error_of(lambda: hvd.start_timeline(file if hvd.rank() != 1 else "")) == wrong
    if hvd.rank() == 0:
        kind, _ = error_of(lambda: hvd.start_timeline(file))
    else:
        kind, _ = error_of(lambda: hvd.allreduce(torch.ones(3), name="instead"))
    assert kind == "MismatchError"
    hvd.start_timeline(file)
    hvd.allreduce(torch.ones(3), name="afterwards")
    hvd.shutdown()


def test_a_timeline_that_cannot_start_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    run(one_is_wrong, 3, initialized=False, args=(str(file),))
    for rank in range(3):
        assert tensors_of(read(file), rank) == ["afterwards"]


def cannot_write_the_second(folder: str) -> None:
    hvd.init()
    hvd.shutdown()
    if os.environ["RANK"] == "0":
        Path(folder).rename(f"{folder} is gone")
    hvd.init()
    hvd.allreduce(torch.ones(3))
    hvd.shutdown()


def test_a_job_that_goes_on_does_not_end_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "timelines"
    folder.mkdir()
    env = {"TORCH_RING_TIMELINE": str(folder / "timeline.json")}
    run(cannot_write_the_second, 2, initialized=False, args=(str(folder),), env=env)
    assert not folder.exists()


def train_twice() -> None:
    for world in range(2):
        hvd.init()
        model = torch.nn.Linear(300, 200)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(5 - world):
            optimizer.zero_grad()
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
        hvd.shutdown()


def test_a_world_that_forms_anew_keeps_the_first_file(tmp_path: Path) -> None:
    """The page shows the buckets of its training."""
    env = {"TORCH_RING_TIMELINE": str(tmp_path / "timeline.json")}
    run(train_twice, 2, initialized=False, env=env)
    for name, steps in (("timeline.json", 5), ("timeline.2.json", 4)):
        recording = read_recording(tmp_path / name)
        assert recording.ranks == [0, 1]
        buckets = [each for each in recording.operations if each.name.startswith("gradients.0.")]
        sent = sum(each.bytes for each in buckets if each.rank == 0)
        assert sent >= steps * (300 * 200 + 200) * 4
        assert [step.number for step in step_times(recording)] == [*range(1, steps)]
        for each in recording.operations:
            assert each.submitted <= each.started <= each.finished


PASSES = 4


def traced(folder: str) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.allreduce(torch.ones(7), name="before")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        hvd.allreduce(torch.ones(5, dtype=torch.float64), name="blocking")
        handle = hvd.broadcast_async(torch.ones(100_000), 0, name="asynchronous")
        hvd.synchronize(handle)
        for _ in range(PASSES):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.barrier()
    hvd.allreduce(torch.ones(7), name="after")
    rows = {each.key: each.count for each in profiler.key_averages()}
    kinds = ("allreduce", "broadcast", "barrier", "agreed")
    kinds += ("agreeing on gradients", "averaging gradients")
    assert {name for name in rows if name.startswith("torch_ring: ")} == {
        f"torch_ring: {kind}" for kind in kinds
    }
    assert rows["torch_ring: averaging gradients"] >= PASSES
    profiler.export_chrome_trace(str(Path(folder) / f"trace{hvd.rank()}.json"))


def profiled(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    assert isinstance(found, list)
    return found


def test_collectives_and_buckets_are_spans(tmp_path: Path) -> None:
    run(traced, 2, args=(str(tmp_path),))
    agreed = []  # by rank
    for rank in range(2):
        found = profiled(tmp_path / f"trace{rank}.json")
        comms = [event for event in found if event["name"] == "record_param_comms"]
        fields = [event["args"] for event in comms]
        assert {each["Rank"] for each in fields} == {rank}
        assert {each["Group size"] for each in fields} == {2}
        assert {each["Process Group Description"] for each in fields} == {"torch_ring, shm"}
        first = fields[0]
        assert first["Collective name"] == "allreduce"
        assert (first["In msg nelems"], first["dtype"]) == (5, "Double")
        assert ("broadcast", 100_000) in [
            (each["Collective name"], each["In msg nelems"]) for each in fields
        ]
        assert "barrier" in {each["Collective name"] for each in fields}
        assert all(event["dur"] >= 0 for event in comms)

        ours = [event for event in found if event["name"].startswith("torch_ring: ")]
        named = [(event["name"], event["args"]["operation"]) for event in ours]
        assert ("torch_ring: allreduce", "allreduce 'blocking' float64 [5] Average") in named
        words = " ".join(operation for _, operation in named)
        for number in range(1, PASSES + 1):
            assert f"averaging the gradients of backward pass {number} (optimizer 0, bu" in words
        assert "'before'" not in words
        assert "'after'" not in words
        marks = [event["args"] for event in ours if event["name"] == "torch_ring: agreed"]
        agreed.append(sorted((each["agreement"], each["operation"]) for each in marks))
        assert len(marks) == len(comms)
    assert agreed[0] == agreed[1]
    assert any("allreduce 'blocking' float64 [5]" in operation for _, operation in agreed[0])


def traced_in_groups(folder: str) -> None:
    pair = dist.new_group([1, 2])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(5, dtype=torch.float64))
        work = dist.broadcast(torch.ones(100_000), src=0, async_op=True)
        assert work is not None
        work.wait()
        if dist.get_rank() > 0:
            dist.all_reduce(torch.ones(7), group=pair)
    dist.barrier()
    profiler.export_chrome_trace(str(Path(folder) / f"trace{dist.get_rank()}.json"))


def test_operations_of_groups_of_torch_distributed_are_spans(tmp_path: Path) -> None:
    on_ring(traced_in_groups, 3, str(tmp_path))
    for rank in range(3):
        comms = [
            event["args"]
            for event in profiled(tmp_path / f"trace{rank}.json")
            if event["name"] == "record_param_comms"
            and event["args"]["Process Group Description"].startswith("torch_ring, ")
        ]
        found = [(each["Collective name"], each["In msg nelems"], each["dtype"]) for each in comms]
        assert found[:2] == [("allreduce", 5, "Double"), ("broadcast", 100_000, "Float")]
        assert found[2:] == ([("allreduce", 7, "Float")] if rank > 0 else [])
        assert [each["Group size"] for each in comms] == [3, 3, 2][: len(comms)]
        assert [each["Rank"] for each in comms] == [rank, rank, rank - 1][: len(comms)]
