"""CountingGroup: lets DDP run on a stand-in, and does to streams and events what NCCL's group does.

Its collectives move nothing: the ranks' gradients must be equal. DDP itself is torch's own.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from stand_in import DEVICE
from torch import Tensor
from torch.futures import Future

SIZE = 2  # DDP divides by it


class CountingGroup(dist.ProcessGroup):
    """A process group that counts its collectives.

    Source of what it asks of the device: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp,
    `collective()`: an event on the caller's stream, for which NCCL's stream waits; the collective;
    the work's end event; and the future's, for which DDP makes its stream wait.
    """

    collectives = 0

    def __init__(self) -> None:
        super().__init__(0, SIZE)
        self._stream = torch.Stream(DEVICE)
        self._device = torch.device(DEVICE, 0)

    def allreduce(self, tensors: list[Tensor], _: Any = None) -> Any:
        CountingGroup.collectives += 1
        ready, done = torch.Event(DEVICE), torch.Event(DEVICE)
        ready.record()
        ready.wait(self._stream)
        future: Future[list[Tensor]] = Future(devices=[self._device])
        with self._stream:
            done.record()
            future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def broadcast(self, tensors: list[Tensor], _: Any = None) -> Any:
        """DDP's plan of buckets, which is this rank's."""
        future: Future[list[Tensor]] = Future()
        future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def getBackendName(self) -> str:  # noqa: N802
        return "counting"


def start_counting_group() -> None:
    """Make it the default group of this process, which is rank 0 of `SIZE`."""
    dist.Backend.register_backend("counting", lambda *_: CountingGroup(), devices=[DEVICE])
    dist.init_process_group(
        "counting",
        store=dist.HashStore(),
        rank=0,
        world_size=SIZE,
        timeout=datetime.timedelta(seconds=60),
    )
