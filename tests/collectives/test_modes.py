# SPDX-License-Identifier: Apache-2.0
"""Results have the mode of the submitting call, whichever thread makes progress."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import DEADLINE_S, eventually
from torch import Tensor

import torch_ring as hvd
from tests.support.groups import on_ring
from torch_ring.world.process_set import engine_of


@on_ranks(2)
def test_strided_inference_tensors() -> None:
    size, rank = hvd.size(), hvd.rank()
    with torch.inference_mode():
        tensor = torch.ones(4, 6) + rank
    view = tensor.t()
    for start in (
        lambda: hvd.allreduce_async_(view, op=hvd.Sum),
        lambda: hvd.broadcast_async_(view, 0),
        lambda: hvd.grouped_allreduce_async_([view], op=hvd.Max),
    ):
        hvd.synchronize(start())
        assert tensor.unique().tolist() == [size * (size + 1) / 2]
    hvd.allreduce_(view, op=hvd.Max)
    assert tensor.is_inference()
    hvd.barrier()  # the world goes on


def strided_inference_tensors_in_group() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    with torch.inference_mode():
        tensor = torch.ones(4, 6) + rank
    view = tensor.t()
    work = dist.all_reduce(view, async_op=True)
    assert work is not None
    work.wait()
    assert tensor.unique().tolist() == [size * (size + 1) / 2]
    dist.broadcast(view, 0)
    dist.all_gather([view, view.clone()], torch.ones(6, 4))
    assert tensor.unique().tolist() == [1]
    if rank == 0:
        dist.recv(view, 1)
        assert tensor.unique().tolist() == [7]
    else:
        dist.send(torch.full((6, 4), 7.0), 0)
    dist.barrier()


def test_strided_inference_tensors_in_a_group() -> None:
    on_ring(strided_inference_tensors_in_group, 2)


@pytest.mark.parametrize("asks_in_inference_mode", [False, True])
@on_ranks(2)
def test_progress_is_made_in_another_mode(asks_in_inference_mode: bool) -> None:
    """A thread requests results; another one, in another mode, waits and makes progress."""
    results: list[Tensor] = []

    def ask() -> None:
        with torch.inference_mode(asks_in_inference_mode):
            rows = torch.ones(hvd.size() * 5_000, 3)
            gathered = hvd.allgather_async(rows, name="gather")
            exchanged = hvd.alltoall_async(rows, name="exchange")
            results.append(hvd.synchronize(gathered))
            results.append(hvd.synchronize(exchanged)[0])

    def ask_later() -> None:
        # A blocking operation is submitted, and its caller begins to make progress, in one.
        engine = engine_of(hvd.global_process_set)
        assert eventually(lambda: any(r.name == "last" for r in engine.records()), DEADLINE_S / 3)
        ask()

    thread = threading.Thread(target=ask_later if hvd.rank() == 0 else ask)
    thread.start()
    if hvd.rank() == 0:
        with torch.inference_mode(not asks_in_inference_mode):
            hvd.allreduce(torch.ones(1), name="last")
        thread.join()
    else:
        thread.join()
        hvd.allreduce(torch.ones(1), name="last")
    assert len(results) == 2
    for result in results:
        assert result.is_inference() == asks_in_inference_mode
        assert result.unique().tolist() == [1.0]


class _Broken(logging.Handler):
    def __init__(self, told: Path) -> None:
        super().__init__()
        self.told = told

    def handle(self, record: logging.LogRecord) -> bool:
        self.told.touch()
        raise OSError("no room")


@on_ranks(2, env={"TORCH_RING_STALL_WARNING": "0.1"})
def test_a_log_handler_that_raises_ends_nothing(tmp_path) -> None:
    told = tmp_path / "told"
    log, handler = logging.getLogger("torch_ring"), _Broken(told)
    if hvd.rank() == 0:
        log.addHandler(handler)
    try:
        if hvd.rank() == 1:  # rank 0 waits until then
            assert eventually(told.exists, DEADLINE_S / 3)
        hvd.allreduce(torch.ones(3), name="late")
    finally:
        log.removeHandler(handler)
    hvd.barrier()
