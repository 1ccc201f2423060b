# SPDX-License-Identifier: Apache-2.0
"""FSDP2, DTensor, tensor parallelism and checkpoints, on ring beside gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.groups import on_ring
from tests.support.shared import is_shared


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 10 + rank))


def sharded_training(
    mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, allocates: bool = False
) -> list[Tensor]:
    model = make_model()
    for layer in (model[0], model[2], model):
        sharded = fully_shard(layer, mesh=mesh, mp_policy=policy)
        if allocates:
            sharded.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # type: ignore[attr-defined]
        optimizer.step()
    return [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


def compare_sharded() -> None:
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    ring = init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        found, wanted = sharded_training(ring, policy), sharded_training(gloo, policy)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [2, 3])
def test_fully_shard(size: int) -> None:
    on_ring(compare_sharded, size, is_fresh=True)


class Buffers(TorchDispatchMode):
    """Records the tensors that the collectives of this thread get.

    Attributes:
        shared: by collective, for each tensor whether it lies in memory that the ranks share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[str, list[bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d":
            found = self.shared.setdefault(name, [])
            found += [is_shared(arg) for arg in args if isinstance(arg, Tensor) and arg.numel()]
        return func(*args, **(kwargs or {}))


def compare_memory() -> tuple[dict[str, list[bool]], dict[str, list[bool]]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    backend = mesh.get_group()._get_backend(torch.device("cpu"))
    assert is_shared(
        backend.allocate_tensor(1000, dtype=torch.bfloat16, device=torch.device("cpu"))
    )
    weights, seen = [], []
    for allocates in (False, True):
        with Buffers() as buffers:
            weights.append(sharded_training(mesh, MixedPrecisionPolicy(), allocates=allocates))
        seen.append(buffers.shared)
    for got, want in zip(*weights, strict=True):
        assert got.equal(want)
    return seen[0], seen[1]


def test_buffers_in_shared_memory() -> None:
    for private, shared in on_ring(compare_memory, 2, is_fresh=True):
        for seen, is_ours in ((private, False), (shared, True)):
            assert set(seen) == {"_allgather_base_", "_reduce_scatter_base_"}
            assert all(set(found) == {is_ours} for found in seen.values()), seen


def hybrid_sharding() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    weights = sharded_training(mesh, MixedPrecisionPolicy())
    flat = sharded_training(init_device_mesh("cpu", (4,)), MixedPrecisionPolicy())
    for got, want in zip(weights, flat, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_hybrid_sharding() -> None:
    on_ring(hybrid_sharding, 4, is_fresh=True)


def redistribute() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    whole = torch.randn(7, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    torch.testing.assert_close(columns.full_tensor(), whole)
    torch.testing.assert_close(rows.redistribute(placements=[Replicate()]).to_local(), whole)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    torch.testing.assert_close(partial.full_tensor(), whole * size)
    scattered = partial.redistribute(placements=[Shard(0)])
    torch.testing.assert_close(scattered.full_tensor(), whole * size)


def test_dtensor() -> None:
    on_ring(redistribute, 3, is_fresh=True)


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_model(), mesh, plan)
    alone = make_model()
    model(batch(0)).square().mean().backward()
    alone(batch(0)).square().mean().backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)  # type: ignore[union-attr]


def test_tensor_parallelism() -> None:
    on_ring(tensor_parallel, 2, is_fresh=True)


def save_and_load(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    fully_shard(model, mesh=mesh)
    state = {"model": model.state_dict(), "step": 7}
    dcp.save(state, checkpoint_id=f"{folder}/now")
    saving: Any = dcp.async_save(state, checkpoint_id=f"{folder}/later")
    saving.result()
    for name in ("now", "later"):
        torch.manual_seed(9)
        fresh = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        fully_shard(fresh, mesh=mesh)
        loaded = {"model": fresh.state_dict(), "step": 0}
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
        assert loaded["step"] == 7
        for got, want in zip(fresh.parameters(), make_model().parameters(), strict=True):
            assert torch.equal(got.full_tensor(), want)  # type: ignore[attr-defined]


def test_distributed_checkpoint(tmp_path: Path) -> None:
    on_ring(save_and_load, 2, str(tmp_path), is_fresh=True)
