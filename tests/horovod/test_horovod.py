# SPDX-License-Identifier: Apache-2.0
"""The behaviours of horovod.torch, on every transport, and under mpirun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from horovod_behaviours import BEHAVIOURS
from launcher_commands import mpirun_command, output_of, start_program
from pool import run

import torch_ring as hvd

PROGRAM = str(Path(__file__).with_name("horovod_behaviours.py"))


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("tcp", 3)])
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_behaviour(behaviour, size, transport):
    run(behaviour, size, transport=transport)


@pytest.mark.launcher
@pytest.mark.weekly
def test_all_behaviours_in_one_job():
    size = 3
    command = [*mpirun_command("Open MPI")[:-1], str(size), sys.executable, PROGRAM]
    output = output_of(start_program(command))
    for rank in range(size):
        assert f"rank {rank} of {size}: {len(BEHAVIOURS)} behaviours" in output, output


NAMES = """
    init shutdown is_initialized rank size local_rank local_size cross_rank cross_size
    is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built
    ddl_built ccl_built cuda_built rocm_built Average Sum Adasum Min Max Product
    HorovodInternalError HostsUpdatedInterrupt ProcessSet global_process_set add_process_set
    remove_process_set
    allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
    grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async
    grouped_allgather grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_
    alltoall alltoall_async reducescatter reducescatter_async grouped_reducescatter
    grouped_reducescatter_async join barrier poll synchronize Compression DistributedOptimizer
    broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object SyncBatchNorm
"""


def test_every_name_is_there():
    assert [name for name in NAMES.split() if not hasattr(hvd, name)] == []
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(hvd.HostsUpdatedInterrupt, RuntimeError)


def test_an_extension_of_torch_is_there_and_no_other():
    assert hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib") is None
    with pytest.raises(ImportError, match=r"has no horovod\.tensorflow"):
        hvd.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__)


def test_every_module_is_there():
    """Programs ask for ``hvd.mpi_ops.Sum``, and import from horovod.torch's modules."""
    from torch_ring.compression import Compressor, FP16Compressor, NoneCompressor
    from torch_ring.optimizer import _DistributedOptimizer
    from torch_ring.sync_batch_norm import SyncBatchNorm

    functions = [
        "broadcast_parameters",
        "broadcast_optimizer_state",
        "broadcast_object",
        "allgather_object",
    ]
    elsewhere = {"Compression", "DistributedOptimizer", "HostsUpdatedInterrupt", "SyncBatchNorm"}
    for name in NAMES.split():
        if name in functions:
            assert getattr(hvd.functions, name) is getattr(hvd, name)
        elif name not in elsewhere:
            assert getattr(hvd.mpi_ops, name) is getattr(hvd, name), name
    assert hvd.mpi_ops._basics is hvd._basics
    assert hvd.optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert issubclass(hvd.Compression.fp16, FP16Compressor)
    assert issubclass(hvd.Compression.none, NoneCompressor)
    assert Compressor is hvd.Compressor
    assert SyncBatchNorm is hvd.SyncBatchNorm
    assert issubclass(_DistributedOptimizer, torch.optim.Optimizer)  # hints are made with it
