"""The spans of collectives in torch.profiler: torch's own fields, and our names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import run
from worlds import on_both_transports

import torch_ring as hvd
from tests.support.groups import on_ring


def traced(folder: str) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    hvd.allreduce(torch.ones(7), name="before")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        hvd.allreduce(torch.ones(5, dtype=torch.float64), name="blocking")
        handle = hvd.broadcast_async(torch.ones(100_000), 0, name="asynchronous")
        hvd.synchronize(handle)
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        hvd.barrier()
    hvd.allreduce(torch.ones(7), name="after")
    profiler.export_chrome_trace(str(Path(folder) / f"trace{hvd.rank()}.json"))


def events(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    assert isinstance(found, list)
    return found


@on_both_transports
def test_collectives_and_buckets_are_spans(tmp_path: Path, transport: str) -> None:
    run(traced, 2, transport=transport, args=(str(tmp_path),))
    agreed = []  # by rank
    for rank in range(2):
        found = events(tmp_path / f"trace{rank}.json")
        comms = [event for event in found if event["name"] == "record_param_comms"]
        fields = [event["args"] for event in comms]
        assert {each["Rank"] for each in fields} == {rank}
        assert {each["Group size"] for each in fields} == {2}
        assert {each["Process Group Description"] for each in fields} == {
            f"torch_ring, {transport}"
        }
        first = fields[0]
        assert first["Collective name"] == "allreduce"
        assert (first["In msg nelems"], first["dtype"]) == (5, "Double")
        assert ("broadcast", 100_000) in [
            (each["Collective name"], each["In msg nelems"]) for each in fields
        ]
        assert "barrier" in {each["Collective name"] for each in fields}
        assert all(event["dur"] >= 0 for event in comms)

        names = [event["name"] for event in found if event["name"].startswith("torch_ring: ")]
        assert any(
            name.startswith("torch_ring: allreduce 'blocking' float64 [5]") for name in names
        )
        assert any("averaging the gradients of backward pass 1" in name for name in names), names
        assert any("bucket 0" in name for name in names), names
        assert not any("'before'" in name or "'after'" in name for name in names)
        numbers = [name for name in names if re.match(r"torch_ring: agreed \d+: ", name)]
        agreed.append(sorted(numbers))
        assert len(numbers) == len(comms)
    assert agreed[0] == agreed[1]
    assert any("allreduce 'blocking' float64 [5]" in name for name in agreed[0])


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


@on_both_transports
def test_operations_of_groups_of_torch_distributed_are_spans(
    tmp_path: Path, transport: str
) -> None:
    on_ring(traced_in_groups, 3, str(tmp_path), transport=transport)
    for rank in range(3):
        comms = [
            event["args"]
            for event in events(tmp_path / f"trace{rank}.json")
            if event["name"] == "record_param_comms"
            and event["args"]["Process Group Description"].startswith("torch_ring, ")
        ]
        found = [(each["Collective name"], each["In msg nelems"], each["dtype"]) for each in comms]
        assert found[:2] == [("allreduce", 5, "Double"), ("broadcast", 100_000, "Float")]
        assert found[2:] == ([("allreduce", 7, "Float")] if rank > 0 else [])
        assert [each["Group size"] for each in comms] == [3, 3, 2][: len(comms)]
        assert [each["Rank"] for each in comms] == [rank, rank, rank - 1][: len(comms)]
