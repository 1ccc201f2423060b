"""dir(torch_ring): the public names, and nothing else."""

import types

import torch_ring as hvd

MODULES = {  # as docs/migrating-from-horovod.md and the guides import them
    "checkpoint",
    "compression",
    "data",
    "elastic",
    "functions",
    "lr_schedules",
    "metrics",
    "mpi_ops",
    "optimizer",
    "preemption",
    "sync_batch_norm",
}


def test_dir_has_the_public_names_and_modules():
    names = set(dir(hvd))
    assert names == {*hvd.__all__, *MODULES, "__version__"} - {"_basics"}
    found = {name for name in names if isinstance(getattr(hvd, name), types.ModuleType)}
    assert found == MODULES
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_operations_are_functions():
    for name in ("allreduce", "allgather", "alltoall", "barrier", "broadcast", "reducescatter"):
        assert isinstance(getattr(hvd, name), types.FunctionType), name
    assert isinstance(hvd.DistributedOptimizer, types.FunctionType)


def test_horovods_internals_stay_reachable():
    assert hvd._basics is hvd.mpi_ops._basics
    assert "_basics" not in dir(hvd)
