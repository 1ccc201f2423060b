# SPDX-License-Identifier: Apache-2.0
"""Parameters whose gradients torch reduces already: DDP, FSDP, DTensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import error_of, run
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from training import make_model, take_step

import torch_ring as hvd


def start_torch_distributed() -> None:
    """Make a process group that sends nothing: the check looks only for a wrapper."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=hvd.rank(), world_size=hvd.size())


def train_beside_ddp(which: str, op: hvd.ReduceOp) -> tuple[str, str]:
    """Train a model; DDP has the same one, another one, or has had one. Return the error."""
    start_torch_distributed()
    try:
        model = make_model()
        ddp = DistributedDataParallel(make_model() if which == "another" else model)
        ddp.register_comm_hook(None, noop_hook)
        if which == "gone":
            del ddp
        trained = ddp if which == "same" else model
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=op)

        def train() -> None:
            for _ in range(3):
                take_step(optimizer, trained(torch.ones(2, 8)).sum())

        return error_of(train)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("which", "op"),
    [
        ("same", hvd.Average),
        ("same", hvd.Adasum),
        ("another", hvd.Average),
        ("gone", hvd.Average),
    ],
)
def test_a_model_of_ddp(which: str, op: hvd.ReduceOp) -> None:
    for kind, text in run(train_beside_ddp, 2, args=(which, op)):
        if which == "same":
            assert kind == "InvalidArgumentError", text
            assert "averages the gradients of 6 of the 6 parameters" in text
        else:
            assert (kind, text) == ("nothing", "")


def wrap_sharded(kind: str) -> tuple[str, str]:
    model: torch.nn.Module = make_model()
    if kind == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (hvd.size(),)))
    else:
        use_orig_params = kind == "original"
        model = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
    optimizer = SGD(model.parameters(), lr=0.1)
    adasum = error_of(lambda: hvd.DistributedOptimizer(optimizer, op=hvd.Adasum))
    average = error_of(lambda: hvd.DistributedOptimizer(optimizer, model.named_parameters()))
    assert adasum[0] == average[0]
    return average


@on_ranks(2)
def test_sharded_parameters_are_refused() -> None:
    start_torch_distributed()
    try:
        for kind, complaint in (
            ("fully_shard", "'0.weight' is a DTensor: this rank has only a part of it"),
            ("flat", "_flat_param' is a parameter of FullyShardedDataParallel: this rank has only"),
            ("original", "is a parameter of FullyShardedDataParallel: this rank has only a part"),
        ):
            error, text = wrap_sharded(kind)
            assert error == "ValueError", text
            assert complaint in text
    finally:
        dist.destroy_process_group()
