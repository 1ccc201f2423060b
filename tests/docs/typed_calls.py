# SPDX-License-Identifier: Apache-2.0
"""Calls as users write them, with the types that they get: test_types.py checks and runs this page.

A line with ``type: ignore`` is a mistake that a type checker must find.
"""

from __future__ import annotations

import os
import tempfile

import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import torch_ring as hvd
from torch_ring import tracing
from torch_ring.data import InputPipeline, ShardedSampler
from torch_ring.elastic import TorchState
from torch_ring.lr_schedules import WarmupLR, cosine_decay
from torch_ring.optimizer import DiLoCoOptimizer, LocalOptimizer, WrappedOptimizer
from torch_ring.run import run
from torch_ring.tracing.lateness import Straggler


class OwnSGD(torch.optim.SGD):
    """A user's optimizer."""

    def halve(self) -> None:
        for group in self.param_groups:
            group["lr"] /= 2


def call_collectives() -> None:
    ones, splits = torch.ones(4), [2 for _ in range(hvd.size())]
    assert_type(hvd.size(), int)
    assert_type(hvd.any_rank(hvd.rank() == 0), bool)
    assert_type(hvd.allreduce(ones, op=hvd.Sum), Tensor)
    assert_type(hvd.allreduce(ones, compression=hvd.Compression.fp16), Tensor)
    assert_type(hvd.grouped_allreduce([ones, ones]), list[Tensor])
    assert_type(hvd.grouped_allgather((ones, ones)), list[Tensor])
    assert_type(hvd.alltoall(ones), Tensor)
    assert_type(hvd.alltoall(ones, splits), tuple[Tensor, Tensor])
    handle = hvd.allreduce_async(ones, name="ones")
    assert_type(handle, hvd.Handle[Tensor])
    assert_type(hvd.poll(handle), bool)
    assert_type(hvd.synchronize(handle), Tensor)
    assert_type(hvd.synchronize(hvd.grouped_allreduce_async([ones])), list[Tensor])
    assert_type(hvd.synchronize(hvd.alltoall_async(ones)), Tensor)
    assert_type(hvd.synchronize(hvd.alltoall_async(ones, splits)), tuple[Tensor, Tensor])
    assert_type(hvd.sparse_allreduce_async(ones.to_sparse())(), Tensor)
    assert_type(hvd.mpi_ops.allreduce_(ones, op=hvd.mpi_ops.Max), Tensor)
    assert_type(hvd.join(), int)


def call_with_objects() -> None:
    assert_type(hvd.broadcast_object(3), int)
    epoch: int | None = 3 if hvd.rank() == 0 else None
    assert_type(hvd.broadcast_object(epoch, root_rank=0), int | None)
    assert_type(hvd.allgather_object({"loss": 0.5}), list[dict[str, float]])
    assert_type(hvd.functions.broadcast_object([epoch]), list[int | None])


def call_process_sets() -> None:
    assert_type(hvd.global_process_set.size(), int)
    assert_type(hvd.broadcast(torch.ones(1), 0, process_set=hvd.global_process_set), Tensor)
    hosts, leaders = hvd.hierarchy()
    assert_type(hosts, hvd.ProcessSet)
    assert_type(leaders.included(), bool)


def wrap_optimizers() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = OwnSGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert_type(optimizer, WrappedOptimizer)
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), 4)
    for scheduler in (
        StepLR(optimizer, 1),
        WarmupLR(optimizer, 2, cosine_decay(2, 5), steps_per_epoch=len(loader)),
    ):
        with optimizer.no_sync():
            model(torch.ones(4)).sum().backward()
        model(torch.ones(4)).sum().backward()
        assert_type(optimizer.synchronize(), None)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    optimizer.set_backward_passes_per_step(2)
    assert_type(optimizer.backward_passes_per_step, int)
    optimizer.halve()  # of the user's class
    hvd.broadcast_optimizer_state(optimizer, 0)


def take_local_steps() -> None:
    parameters = list(torch.nn.Linear(4, 1).parameters())
    local = hvd.LocalSGD(torch.optim.SGD(parameters), every=4)
    assert_type(local, LocalOptimizer)
    assert_type(local.end_round(), None)
    diloco = hvd.DiLoCo(torch.optim.AdamW(parameters), every=4)
    assert_type(diloco, DiLoCoOptimizer)
    assert_type(diloco.outer, torch.optim.Optimizer)
    StepLR(diloco.outer, 1)


def read_data() -> None:
    dataset = TensorDataset(torch.ones(8, 1))
    sampler = ShardedSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for (batch,) in InputPipeline(loader):
        assert batch.shape == (2, 1)
    for word in hvd.data.split(["a", "b"]):
        assert_type(word, str)
    loss = hvd.metrics.Mean()
    loss.update(torch.tensor(0.5), count=4)
    assert_type(loss.compute(), float)


@hvd.elastic.run
def train(state: TorchState, steps: int = 2) -> float:
    while state.step < steps:
        state.step += 1
        state.commit()
    return 0.5


def train_elastically() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = TorchState(model=model, optimizer=optimizer, step=0)
    assert_type(train(state, steps=1), float)


def look_back() -> None:
    with tempfile.TemporaryDirectory() as folder:
        hvd.checkpoint.save(os.path.join(folder, "model.pt"), {"epoch": 1})
        hvd.start_timeline(os.path.join(folder, "timeline.json"))
        hvd.stop_timeline()
    assert_type(tracing.stragglers(), list[Straggler])


def launch() -> list[str]:
    return run(str, (1,), np=2)


def make_mistakes(optimizer: WrappedOptimizer, state: TorchState) -> None:
    hvd.allredcue(torch.ones(1))  # type: ignore[attr-defined]
    hvd.elastic.rnu(train)  # type: ignore[attr-defined]
    hvd.allreduce([1, 2])  # type: ignore[arg-type]
    hvd.synchronize(torch.ones(1))  # type: ignore[arg-type]
    hvd.DistributedOptimizer(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    optimizer.set_backward_passes_per_step("2")  # type: ignore[arg-type]
    train(state, steps="2")  # type: ignore[arg-type]
    train()  # type: ignore[call-arg]

    @hvd.elastic.run  # type: ignore[type-var]
    def train_without_state() -> None: ...


PAGE = (
    call_collectives,
    call_with_objects,
    call_process_sets,
    wrap_optimizers,
    take_local_steps,
    read_data,
    train_elastically,
    look_back,
)

if __name__ == "__main__":
    hvd.init()
    for each in PAGE:
        each()
