# SPDX-License-Identifier: Apache-2.0
"""FSDP2, DTensor, tensor parallelism and checkpoints, on ring beside gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.groups import on_ring


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


@on_ranks(3, by=on_ring, is_fresh=True)
def test_fully_shard() -> None:
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    ring = init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        wanted = sharded_training(gloo, policy)
        for allocates in (False, True):  # in the memory that the ranks share
            found = sharded_training(ring, policy, allocates=allocates)
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@on_ranks(4, by=on_ring, is_fresh=True)
def test_hybrid_sharding() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    weights = sharded_training(mesh, MixedPrecisionPolicy())
    flat = sharded_training(init_device_mesh("cpu", (4,)), MixedPrecisionPolicy())
    for got, want in zip(weights, flat, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


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


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_model(), mesh, plan)
    alone = make_model()
    model(batch(0)).square().mean().backward()
    alone(batch(0)).square().mean().backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)  # type: ignore[union-attr]


def save_and_load(folder: str) -> None:
    """One checkpoint is saved beside the training, with a group of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    fully_shard(model, mesh=mesh)
    state = {"model": model.state_dict(), "step": 7}
    dcp.save(state, checkpoint_id=f"{folder}/now")
    saving: Any = dcp.async_save(
        state, checkpoint_id=f"{folder}/later", process_group=dist.new_group()
    )
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


def use_meshes(folder: str) -> None:
    redistribute()
    tensor_parallel()
    save_and_load(folder)


def test_dtensor_tensor_parallelism_and_checkpoints(tmp_path: Path) -> None:
    on_ring(use_meshes, 2, str(tmp_path), is_fresh=True)
