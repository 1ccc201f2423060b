# SPDX-License-Identifier: Apache-2.0
"""The timeline as programs for horovod.torch read it: by its text, also while the job runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from pool import eventually, run
from worlds import on_both_transports

import torch_ring as hvd

DEADLINE_S = 30.0
PHASES = ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"]


def lacks(file: Path, *words: str) -> list[str]:
    text = file.read_text()
    return [word for word in words if word not in text]


def look_while_the_job_runs(folder: str) -> None:
    """The setting is there when init() is called, and this rank writes the file."""
    file = Path(folder) / "timeline.json"
    os.environ["HOROVOD_TIMELINE"] = str(file)
    os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    hvd.init()
    hvd.allreduce(torch.tensor([1.0, 2.0, 3.0]), name="loss")
    words = ["allreduce.loss", *PHASES]
    if hvd.rank() == 0:
        assert eventually(lambda: not lacks(file, *words), DEADLINE_S), file.read_text()
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("size", [1, 2])
def test_an_operation_is_in_the_file_while_the_job_runs(tmp_path: Path, size: int) -> None:
    run(look_while_the_job_runs, size, initialized=False, args=(str(tmp_path),))
    events = json.loads((tmp_path / "timeline.json").read_text())
    tensors = [(event["pid"], event["args"]["tensor"]) for event in events if "dur" in event
               and event["name"] == "ALLREDUCE"]  # fmt: skip
    assert sorted(tensors) == [(rank + 1, "allreduce.loss") for rank in range(size)]


def every_collective(file: str) -> None:
    hvd.start_timeline(file, mark_cycles=True)
    values = torch.ones(4, 2)
    hvd.allreduce(values, name="one")
    hvd.allgather(values, name="two")
    hvd.broadcast(values, 0, name="three")
    hvd.alltoall(values, name="four")
    hvd.reducescatter(values, name="five")
    hvd.stop_timeline()
    if hvd.rank() == 0:  # the ended operations of all ranks are there
        names = ["allreduce.one", "allgather.two", "broadcast.three", "alltoall.four"]
        assert lacks(Path(file), *names, "reducescatter.five", *PHASES) == []
        events = json.loads(Path(file).read_text())
        assert {event["pid"] for event in events} == {rank + 1 for rank in range(hvd.size())}
    hvd.allreduce(values, name="afterwards")
    hvd.barrier()
    if hvd.rank() == 0:
        assert lacks(Path(file), "afterwards") == ["afterwards"]
    hvd.barrier()


@on_both_transports
def test_a_timeline_in_the_middle_of_a_job(tmp_path: Path, transport: str) -> None:
    run(every_collective, 2, transport=transport, args=(str(tmp_path / "timeline.json"),))
