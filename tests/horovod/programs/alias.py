# SPDX-License-Identifier: Apache-2.0
"""A program for Horovod, which it imports first and also uses in its child processes."""

import horovod.torch as hvd  # isort: skip

import multiprocessing
import pickle
import subprocess
import sys

import horovod
import horovod.torch.elastic
import torch
from horovod import torch as horovod_torch
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import gloo_built, mpi_built, nccl_built
from horovod.runner import run
from horovod.torch.compression import Compression
from horovod.torch.elastic import run as run_elastic
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.functions import broadcast_object, broadcast_parameters
from horovod.torch.mpi_ops import Average, allreduce_async_, synchronize
from horovod.torch.optimizer import DistributedOptimizer, _DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
from torch.utils.data import DataLoader

import torch_ring
import torch_ring.run

DATA = list(range(4))


def module_of_a_worker(batch: list[int]) -> tuple[str, int]:
    """Return the module that a worker finds as horovod.torch."""
    return hvd.__name__, len(batch)


def main() -> None:
    assert hvd is torch_ring
    assert hvd is horovod.torch is horovod_torch
    assert horovod.run is run is torch_ring.run.run
    assert horovod.__version__ == "0.28.1"  # programs take it apart into numbers
    for thing in (
        *(Average, Compression, DistributedOptimizer, HorovodInternalError, HostsUpdatedInterrupt),
        *(ProcessSet, SyncBatchNorm, allreduce_async_, broadcast_object, broadcast_parameters),
        *(gloo_built, global_process_set, mpi_built, nccl_built, synchronize),
    ):
        assert any(thing is each for each in vars(torch_ring).values()), thing
    assert ObjectState is torch_ring.elastic.ObjectState
    assert ElasticSampler is torch_ring.elastic.ElasticSampler
    assert TorchState is torch_ring.elastic.TorchState
    assert run_elastic is torch_ring.elastic.run is horovod.torch.elastic.run
    assert issubclass(_DistributedOptimizer, torch.optim.Optimizer)
    assert b"horovod" not in pickle.dumps((TorchState, HorovodInternalError, hvd.allreduce))

    spawned = multiprocessing.get_context("spawn")
    loader = DataLoader(
        DATA, 4, num_workers=1, collate_fn=module_of_a_worker, multiprocessing_context=spawned
    )
    assert list(loader) == [("torch_ring", 4)]
    command = [sys.executable, "-c", "import horovod; print(horovod.__version__)"]
    assert subprocess.check_output(command, text=True) == f"{horovod.__version__}\n"

    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    print(f"rank {hvd.rank()}: {int(total)} ranks, {sys.argv[1:]}", flush=True)


if __name__ == "__main__":
    main()
