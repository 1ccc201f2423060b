# SPDX-License-Identifier: Apache-2.0
"""Another default device or dtype of torch changes nothing: helper tensors lie on the CPU."""

from __future__ import annotations

import pickle
import re
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closed_form import COLLECTIVES
from dtype_checks import check_gradients, check_results
from groups import on_ring
from pool import run
from torch import nn
from torch.optim import LBFGS, SGD

import torch_ring as hvd


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cpu", dtype=torch.float32)


def model() -> nn.Module:
    """Return the same model on every rank."""
    made = nn.Sequential(nn.Linear(4, 300), hvd.SyncBatchNorm(300), nn.Linear(300, 1))
    made = made.to_empty(device="cpu").float()
    for index, value in enumerate(made.state_dict().values()):
        value.fill_(1 + index)
    return made


def train(optimizer_of: Callable[[Any], torch.optim.Optimizer], **options: Any) -> None:
    trained = model()
    optimizer = hvd.DistributedOptimizer(
        optimizer_of(trained.parameters()), trained.named_parameters(), **options
    )
    for _ in range(2):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            batch = ones(2, 4).cumsum(0) + hvd.rank()
            loss = trained(batch).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, LBFGS):
            optimizer.step(lambda: float(closure()))
        else:
            closure()
            optimizer.step()
    assert all(p.device.type == "cpu" for p in trained.parameters())
    hvd.broadcast_parameters(trained.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.broadcast_buffers(trained)
    hvd.verify_consistency(trained, optimizer)


def optimize() -> None:
    def sgd(parameters: Any) -> SGD:
        return SGD(parameters, lr=1e-6, momentum=0.9)

    train(sgd)
    train(sgd, backward_passes_per_step=1, op=hvd.Sum)
    train(sgd, op=hvd.Adasum)
    train(sgd, nan_check=True)
    train(sgd, shard_state=True)
    compression = hvd.Compression
    for kind in (compression.fp16, compression.int8(), compression.powersgd()):
        train(sgd, compression=kind)
    train(lambda parameters: LBFGS(parameters, lr=1e-6, max_iter=2))
    words = nn.Embedding(9, 2, sparse=True, device="cpu", dtype=torch.float32)
    optimizer = hvd.DistributedOptimizer(SGD(words.parameters(), lr=0.1))
    nn.init.zeros_(words.weight)
    words(torch.tensor([1, 3], device="cpu")).sum().backward()
    optimizer.step()
    torch.testing.assert_close(words.weight[1], -0.1 * ones(2))


def agree_once_in_a_while() -> None:
    """Use hvd.LocalSGD, hvd.DiLoCo and hvd.hierarchy."""
    compression = hvd.Compression
    for kind in (compression.none, compression.bf16, compression.int8(), compression.powersgd()):
        trained = model()
        host, one_of_each_host = hvd.hierarchy()
        optimizer = hvd.DiLoCo(
            hvd.DistributedOptimizer(SGD(trained.parameters(), lr=1e-6), process_set=host),
            every=2,
            delay=1,
            compression=kind,
            process_set=one_of_each_host,
        )
        alone = hvd.LocalSGD(SGD([nn.Parameter(ones(3))], lr=1.0), every=2)
        for _ in range(4):
            for each in (optimizer, alone):
                for group in each.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                each.step()
        optimizer.end_round()
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(p.device.type == "cpu" for p in optimizer.outer.param_groups[0]["params"])


def use_sets() -> None:
    added = hvd.add_process_set([0])
    if added.included():
        assert hvd.allreduce(ones(3), process_set=added).tolist() == [1.0] * 3
    assert hvd.remove_process_set(added)
    assert pickle.loads(pickle.dumps(hvd.global_process_set)) is hvd.global_process_set


def share() -> None:
    shared = hvd.empty_shared(3, 4)
    assert shared.device.type == "cpu"
    assert shared.dtype == torch.get_default_dtype()
    shared.fill_(1)
    assert (hvd.allreduce_(shared, op=hvd.Sum) == hvd.size()).all()


def feed() -> None:
    """Use hvd.data, hvd.metrics, hvd.checkpoint and hvd.lr_schedules."""
    sampler = hvd.data.ShardedSampler(40)
    assert len(list(sampler)) == 40 // hvd.size()
    batches = [(ones(2, 4), ones(2)) for _ in range(6)]
    pipeline = hvd.data.InputPipeline(batches)
    for _ in pipeline:
        pass
    pipeline.report(lambda batch: batch[0].sum(), steps=2, rounds=1)
    mean = hvd.metrics.Mean()
    mean.update(2.0)
    assert mean.compute() == 2.0
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))
    hvd.checkpoint.save(folder / "c.pt", {"weights": ones(3)})
    loaded = hvd.checkpoint.load(folder / "c.pt")
    assert loaded["weights"].tolist() == [1.0] * 3
    hvd.barrier()
    if hvd.rank() == 0:
        (folder / "c.pt").unlink()
        folder.rmdir()


def be_elastic() -> None:
    """Use hvd.elastic's states and sampler."""
    trained = model()
    optimizer = hvd.DistributedOptimizer(SGD(trained.parameters(), lr=1e-6, momentum=0.9))
    sampler = hvd.elastic.ElasticSampler(range(40), shuffle=True)
    state = hvd.elastic.TorchState(trained, optimizer, sampler=sampler, batch=0)
    state.sync()
    sampler.record_batch(0, 4)
    state.batch = 1
    state.commit()
    with torch.no_grad():
        trained[0].weight.fill_(9)
    state.restore()
    assert (trained[0].weight == 1).all()
    assert len(list(sampler)) == len(sampler)


def trace() -> None:
    """Use hvd.tracing: its results are the same as on the CPU."""
    hvd.allreduce(ones(2), name="traced")
    assert hvd.tracing.snapshot()
    assert hvd.tracing.report()
    hvd.tracing.stragglers()
    with tempfile.TemporaryDirectory() as folder:
        assert hvd.tracing.dump(Path(folder) / "dump")


def collect() -> None:
    """Use every collective, and those of objects."""
    check_results(dtypes=[torch.float32])
    check_gradients()
    handle = hvd.allreduce_async(ones(2))
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
    splits = torch.tensor([2] * hvd.size(), device="cpu")
    received, counts = hvd.alltoall(ones(2 * hvd.size()), splits)
    assert counts.device.type == received.device.type == "cpu"
    sparse = hvd.sparse_allreduce_async(ones(2).to_sparse(), op=hvd.Sum)()
    assert sparse.to_dense().tolist() == [hvd.size()] * 2
    assert hvd.allgather_object("a") == ["a"] * hvd.size()
    assert hvd.broadcast_object({"a": ones(2)})["a"].tolist() == [1.0, 1.0]
    hvd.convert_sync_batchnorm(model())
    hvd.barrier()
    assert hvd.join() in range(hvd.size())


CALLS = [optimize, agree_once_in_a_while, use_sets, share, feed, be_elastic, trace, collect]


def call_all(device: str, dtype: torch.dtype, manner: str) -> None:
    torch.set_default_dtype(dtype)
    if manner == "context":
        with torch.device(device):
            call_each()
    else:
        torch.set_default_device(device)
        try:
            call_each()
        finally:  # the process may run other tests
            torch.set_default_device(None)


def call_each() -> None:
    hvd.init()
    assert torch.ones(1).device.type == torch.get_default_device().type
    for call in CALLS:
        call()
    hvd.shutdown()


@pytest.mark.parametrize(("manner", "transport"), [("default", "tcp"), ("context", "shm")])
def test_public_functions_under_another_default_device(manner, transport):
    args = ("meta", torch.float32, manner)
    run(call_all, 2, args=args, transport=transport, initialized=False)


def use_a_group(manner: str) -> None:
    """Call operations of torch.distributed on the backend ring."""
    if manner == "context":
        with torch.device("meta"):
            use_ring()
    else:
        torch.set_default_device("meta")
        use_ring()


def use_ring() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert torch.ones(1).device.type == "meta"
    tensor = ones(3) * (rank + 1)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 3
    dist.broadcast(tensor, 0)
    rows = [ones(3) for _ in range(size)]
    dist.all_gather(rows, tensor)
    dist.reduce_scatter(ones(3), rows)
    dist.all_to_all_single(ones(2 * size), ones(2 * size))
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    dist.barrier()
    trained = nn.Linear(4, 1, device="cpu", dtype=torch.float32)
    nn.init.ones_(trained.weight)
    nn.init.zeros_(trained.bias)
    parallel = nn.parallel.DistributedDataParallel(trained)
    parallel(ones(2, 4)).sum().backward()
    assert trained.weight.grad is not None
    assert trained.weight.grad.tolist() == [[2.0] * 4]


@pytest.mark.parametrize(("manner", "transport"), [("default", "tcp"), ("context", "shm")])
def test_the_ring_backend_under_another_default_device(manner, transport):
    on_ring(use_a_group, 2, manner, transport=transport, is_fresh=True)


def test_public_functions_under_another_default_dtype():
    run(call_all, 2, args=("cpu", torch.bfloat16, "default"), initialized=False)


def test_every_public_function_is_called():
    """By its name, in this file; check_results() calls each form of a collective."""
    without_tensors = ("_built", "_enabled", "_supported", "_timeline", "_extension")
    without_tensors += ("rank", "size", "homogeneous", "initialized")
    called = {form for each in COLLECTIVES for form in each.forms}
    called |= set(re.findall(r"hvd\.(\w+)", Path(__file__).read_text()))
    functions = {
        name
        for name in hvd.__all__
        if isinstance(getattr(hvd, name), types.FunctionType) and not name.endswith(without_tensors)
    }
    assert functions <= called
