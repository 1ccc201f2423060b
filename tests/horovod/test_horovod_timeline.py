# SPDX-License-Identifier: Apache-2.0
"""The timeline as programs for horovod.torch read it: by its text, also while the job runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from on_ranks import on_ranks
from pool import eventually
from worlds import on_both_transports

import torch_ring as hvd


def lacks(file: Path, *words: str) -> list[str]:
    text = file.read_text()
    return [word for word in words if word not in text]


@on_both_transports
@on_ranks(2, initialized=False)
def test_a_timeline_is_read_while_the_job_runs(tmp_path, transport) -> None:
    """The setting is there when init() is called, and rank 0 writes the file."""
    folder = str(tmp_path)
    file = Path(folder) / "timeline.json"
    os.environ["HOROVOD_TIMELINE"] = str(file)
    os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    hvd.init()
    hvd.allreduce(torch.ones(3), name="loss")
    words = ["allreduce.loss", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"]
    if hvd.rank() == 0:
        assert eventually(lambda: not lacks(file, *words)), file.read_text()
    hvd.barrier()
    hvd.alltoall(torch.ones(4), name="last")
    hvd.stop_timeline()
    if hvd.rank() == 0:  # the ended operations of all ranks are there
        events = json.loads(file.read_text())
        tensors = [
            (event["pid"], event["args"]["tensor"])
            for event in events
            if event["name"] in ("ALLREDUCE", "ALLTOALL")
        ]
        names = ("allreduce.loss", "alltoall.last")
        assert sorted(tensors) == [(rank + 1, name) for rank in range(2) for name in names]
    hvd.allreduce(torch.ones(3), name="afterwards")
    hvd.barrier()
    if hvd.rank() == 0:
        assert lacks(file, "afterwards") == ["afterwards"]
    hvd.shutdown()
