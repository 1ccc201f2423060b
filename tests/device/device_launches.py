# SPDX-License-Identifier: Apache-2.0
"""Launches without an agreement on any accelerator, called as device_operations are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from closed_form import reduced, stacked_tensors, tensor_of
from device_operations import busy

import torch_ring as hvd
from torch_ring._C import launch_allreduce
from torch_ring.world import current


def check_launches(device: str) -> None:
    """Launch and agree by turns, in the order of streams; no host waits for another."""
    engine = current.engine()
    mine = torch.ones(3, device=device)
    with pytest.raises(hvd.RingError, match="a launch needs an agreed operation on the device"):
        launch_allreduce(engine, mine, hvd.Sum, 1.0, 1.0)
    hvd.allreduce(mine)
    size = hvd.size()
    for dtype in (torch.float32, torch.float16, torch.int64):
        for shape in ((), (0,), (7, 11), (30_011,)):
            for op in (hvd.Average, hvd.Sum, hvd.Max):
                tensor = torch.zeros(shape, dtype=dtype, device=device)
                busy(device, 1)
                tensor.copy_(tensor_of(hvd.rank(), shape, dtype, size))  # on a late stream
                launched = launch_allreduce(engine, tensor, op, 1.0, 1.0)
                assert launched.wait() is tensor
                assert launched.done() in (False, True)
                want = reduced(stacked_tensors(shape, dtype), op)
                torch.testing.assert_close(tensor.cpu(), want)
                assert torch.equal(hvd.allreduce(tensor, op=hvd.Max), tensor)


def close_with_launches_outstanding(device: str) -> None:
    """shutdown() waits until launched reductions have run."""
    engine = current.engine()
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    busy(device, 100)
    launched = launch_allreduce(engine, mine, hvd.Sum, 1.0, 1.0)
    size = hvd.size()
    hvd.shutdown()
    assert launched.done()
    assert launched.wait().tolist() == [size] * 3
    with pytest.raises(hvd.RingError, match="shut down"):
        launch_allreduce(engine, mine, hvd.Sum, 1.0, 1.0)
    hvd.init()


LAUNCHES: list[Callable[[str], None]] = [check_launches, close_with_launches_outstanding]
