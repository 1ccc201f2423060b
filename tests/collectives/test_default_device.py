"""Another default device or dtype of torch changes nothing: helper tensors lie on the CPU."""

from __future__ import annotations

import pickle
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


def wait(handle: Any) -> Any:
    while not hvd.poll(handle):
        pass
    return hvd.synchronize(handle)


def rows() -> list[float]:
    return [1.0] * (2 * hvd.size())


def sums() -> list[float]:
    return [float(hvd.size())] * 2


def check_leaf(operation: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """Return the result of an operation whose backward pass works, too."""
    leaf = ones(2 * hvd.size()).requires_grad_()
    result = operation(leaf)
    result.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.device.type == "cpu"
    return result.tolist()


def scatter() -> list[int]:
    splits = torch.tensor([2] * hvd.size(), device="cpu")
    received, counts = hvd.alltoall(ones(2 * hvd.size()), splits)
    assert counts.device.type == received.device.type == "cpu"
    return received.tolist()


S = {"op": hvd.Sum}
CALLS: dict[str, Callable[[], object]] = {
    "DistributedOptimizer": optimize,
    "add_process_set": use_sets,
    "DiLoCo": agree_once_in_a_while,
    "empty_shared": share,
    "convert_sync_batchnorm": lambda: hvd.convert_sync_batchnorm(model()),
    "allgather": lambda: check_leaf(hvd.allgather) == rows() * hvd.size(),
    "allgather_async": lambda: wait(hvd.allgather_async(ones(2))).tolist() == rows(),
    "allgather_object": lambda: hvd.allgather_object("a") == ["a"] * hvd.size(),
    "grouped_allgather": lambda: hvd.grouped_allgather([ones(2)])[0].tolist() == rows(),
    "grouped_allgather_async": lambda: (
        wait(hvd.grouped_allgather_async([ones(2)]))[0].tolist() == rows()
    ),
    "allreduce": lambda: check_leaf(hvd.allreduce) == rows(),
    "allreduce_": lambda: hvd.allreduce_(ones(2), **S).tolist() == sums(),
    "allreduce_async": lambda: wait(hvd.allreduce_async(ones(2), **S)).tolist() == sums(),
    "allreduce_async_": lambda: wait(hvd.allreduce_async_(ones(2), **S)).tolist() == sums(),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([ones(2)], **S)[0].tolist() == sums(),
    "grouped_allreduce_": lambda: hvd.grouped_allreduce_([ones(2)], **S)[0].tolist() == sums(),
    "grouped_allreduce_async": lambda: (
        wait(hvd.grouped_allreduce_async([ones(2)], **S))[0].tolist() == sums()
    ),
    "grouped_allreduce_async_": lambda: (
        wait(hvd.grouped_allreduce_async_([ones(2)], **S))[0].tolist() == sums()
    ),
    "alltoall": lambda: scatter() == check_leaf(hvd.alltoall) == rows(),
    "alltoall_async": lambda: wait(hvd.alltoall_async(ones(2 * hvd.size()))).tolist() == rows(),
    "barrier": hvd.barrier,
    "join": lambda: hvd.join() in range(hvd.size()),
    "broadcast": lambda: check_leaf(lambda x: hvd.broadcast(x, 0)) == rows(),
    "broadcast_": lambda: hvd.broadcast_(ones(2), 0).tolist() == [1.0, 1.0],
    "broadcast_async": lambda: wait(hvd.broadcast_async(ones(2), 0)).tolist() == [1.0, 1.0],
    "broadcast_async_": lambda: wait(hvd.broadcast_async_(ones(2), 0)).tolist() == [1.0, 1.0],
    "broadcast_object": lambda: hvd.broadcast_object({"a": ones(2)})["a"].tolist() == [1.0, 1.0],
    "reducescatter": lambda: check_leaf(lambda x: hvd.reducescatter(x, **S)) == sums(),
    "reducescatter_async": lambda: (
        wait(hvd.reducescatter_async(ones(2 * hvd.size()), **S)).tolist() == sums()
    ),
    "grouped_reducescatter": lambda: (
        hvd.grouped_reducescatter([ones(2 * hvd.size())], **S)[0].tolist() == sums()
    ),
    "grouped_reducescatter_async": lambda: (
        wait(hvd.grouped_reducescatter_async([ones(2 * hvd.size())], **S))[0].tolist() == sums()
    ),
    "sparse_allreduce_async": lambda: (
        hvd.sparse_allreduce_async(ones(2).to_sparse(), **S)().to_dense().tolist() == sums()
    ),
    "checkpoint, data, metrics": feed,
    "elastic": be_elastic,
    "tracing": trace,
}
# Names that the functions above call as well.
COVERED = {
    "LocalSGD",
    "broadcast_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "hierarchy",
    "init",
    "poll",
    "remove_process_set",
    "shutdown",
    "synchronize",
    "verify_consistency",
}
WITHOUT_TENSORS = (
    *("_built", "_enabled", "_supported", "_timeline"),
    *("rank", "size", "homogeneous", "initialized"),
)


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
    for name, call in CALLS.items():
        assert call() in (None, True) or name == "convert_sync_batchnorm", name
    hvd.shutdown()


@pytest.mark.parametrize(
    ("manner", "transport"), [("default", "shm"), ("default", "tcp"), ("context", "shm")]
)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_public_functions_under_another_default_dtype(dtype):
    run(call_all, 2, args=("cpu", dtype, "default"), initialized=False)


def test_every_public_function_is_called():
    functions = {
        name
        for name in hvd.__all__
        if isinstance(getattr(hvd, name), types.FunctionType) and not name.endswith(WITHOUT_TENSORS)
    }
    assert functions - COVERED <= set(CALLS)
