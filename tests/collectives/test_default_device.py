# SPDX-License-Identifier: Apache-2.0
"""Another default device or dtype of torch changes nothing: helper tensors lie on the CPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dtype_checks import check_gradients, check_results
from groups import on_ring
from pool import run
from torch import nn
from torch.optim import SGD

import torch_ring as hvd

FACTORIES = {"tensor", "as_tensor", "asarray", "arange", "full", "randint", "randperm", "normal"}
OF_DEFAULT_DTYPE = {"zeros", "ones", "empty", "rand", "randn", "eye", "linspace", "empty_strided"}
# The calls of programs, and of tensors without values, which need no device or dtype.
PLAIN = {"standby_process.py", "rank.py", "shared_tensors.py"}


def calls_without_a_place(path: Path) -> Iterator[str]:
    """Yield the calls in a module that make a tensor of the default device or dtype."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        if module != "torch" or name not in FACTORIES | OF_DEFAULT_DTYPE:
            continue
        needed = {"device", "dtype"} if name in OF_DEFAULT_DTYPE else {"device"}
        if not needed <= {keyword.arg for keyword in node.keywords}:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_every_call_that_makes_a_tensor_names_its_device():
    modules = [path for path in Path(hvd.__file__).parent.rglob("*.py") if path.name not in PLAIN]
    assert len(modules) > 50
    assert [call for path in modules for call in calls_without_a_place(path)] == []


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cpu", dtype=torch.float32)


def model() -> nn.Module:
    """Return the same model on every rank."""
    made = nn.Sequential(nn.Linear(4, 300), hvd.SyncBatchNorm(300), nn.Linear(300, 1))
    made = made.to_empty(device="cpu").float()
    for index, value in enumerate(made.state_dict().values()):
        value.fill_(1 + index)
    return made


def train(**options: Any) -> None:
    trained = model()
    optimizer = hvd.DistributedOptimizer(
        SGD(trained.parameters(), lr=1e-6, momentum=0.9), trained.named_parameters(), **options
    )
    for _ in range(2):
        optimizer.zero_grad()
        trained(ones(2, 4).cumsum(0) + hvd.rank()).square().mean().backward()
        optimizer.step()
    assert all(p.device.type == "cpu" for p in trained.parameters())
    hvd.broadcast_parameters(trained.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.broadcast_buffers(trained)
    hvd.verify_consistency(trained, optimizer)


def optimize() -> None:
    for options in ({}, {"op": hvd.Adasum}, {"nan_check": True}, {"shard_state": True}):
        train(**options)
    for kind in (hvd.Compression.fp16, hvd.Compression.int8(), hvd.Compression.powersgd()):
        train(compression=kind)
    words = nn.Embedding(9, 2, sparse=True, device="cpu", dtype=torch.float32)
    optimizer = hvd.DistributedOptimizer(SGD(words.parameters(), lr=0.1))
    nn.init.zeros_(words.weight)
    words(torch.tensor([1, 3], device="cpu")).sum().backward()
    optimizer.step()
    torch.testing.assert_close(words.weight[1], -0.1 * ones(2))


def agree_once_in_a_while() -> None:
    for kind in (hvd.Compression.none, hvd.Compression.int8(), hvd.Compression.powersgd()):
        trained = model()
        optimizer = hvd.DiLoCo(
            SGD(trained.parameters(), lr=1e-6), every=2, delay=1, compression=kind
        )
        for _ in range(4):
            for parameter in trained.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        optimizer.end_round()
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(p.device.type == "cpu" for p in optimizer.outer.param_groups[0]["params"])


def be_elastic() -> None:
    trained = model()
    optimizer = hvd.DistributedOptimizer(SGD(trained.parameters(), lr=1e-6, momentum=0.9))
    sampler = hvd.elastic.ElasticSampler(range(40), shuffle=True)
    state = hvd.elastic.TorchState(trained, optimizer, sampler=sampler, batch=0)
    state.sync()
    sampler.record_batch(0, 4)
    state.commit()
    with torch.no_grad():
        trained[0].weight.fill_(9)
    state.restore()
    assert (trained[0].weight == 1).all()
    assert len(list(sampler)) == len(sampler)


def collect() -> None:
    check_results(dtypes=[torch.float32])
    check_gradients()
    splits = torch.tensor([2] * hvd.size(), device="cpu")
    received, counts = hvd.alltoall(ones(2 * hvd.size()), splits)
    assert counts.device.type == received.device.type == "cpu"
    sparse = hvd.sparse_allreduce_async(ones(2).to_sparse(), op=hvd.Sum)()
    assert sparse.to_dense().tolist() == [hvd.size()] * 2
    shared = hvd.empty_shared(3, 4)
    assert (shared.device.type, shared.dtype) == ("cpu", torch.get_default_dtype())
    assert hvd.broadcast_object({"a": ones(2)})["a"].tolist() == [1.0, 1.0]
    mean = hvd.metrics.Mean()
    mean.update(2.0)
    assert mean.compute() == 2.0
    assert not hvd.any_rank(False)
    hvd.barrier()
    hvd.join()


def call_all(device: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        hvd.init()
        assert torch.ones(1).device.type == torch.get_default_device().type
        for call in (optimize, agree_once_in_a_while, be_elastic, collect):
            call()
        hvd.shutdown()
    finally:  # the process may run other tests
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_another_default_device():
    run(call_all, 2, args=("meta", torch.float32), initialized=False)


def test_another_default_dtype():
    run(call_all, 2, args=("cpu", torch.bfloat16), initialized=False)


def use_ring() -> None:
    """Use torch.distributed with the backend ring."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = ones(3) * (rank + 1)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 3
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
    parallel = nn.parallel.DistributedDataParallel(trained)
    parallel(ones(2, 4)).sum().backward()
    assert trained.weight.grad is not None
    assert trained.weight.grad.tolist() == [[2.0] * 4]


def test_the_ring_backend_under_other_defaults():
    on_ring(use_ring, 2, is_fresh=True)
