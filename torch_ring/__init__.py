# SPDX-License-Identifier: Apache-2.0
"""torch_ring: data-parallel training of a PyTorch model on many processes.

``import torch_ring as hvd`` runs scripts written for ``horovod.torch``.

The public names are those of `torch_ring.api`, which needs torch. The first use of a name imports
both, so a launcher, which uses none of them, starts without torch. If torch is imported already,
the names are there at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from torch_ring.native import find_native_module

if TYPE_CHECKING:  # each name from its module, as mypy loses stars in a circle of imports
    from torch_ring import (
        checkpoint as checkpoint,
        compression as compression,
        data as data,
        elastic as elastic,
        functions as functions,
        lr_schedules as lr_schedules,
        metrics as metrics,
        mpi_ops as mpi_ops,
        optimizer as optimizer,
        sync_batch_norm as sync_batch_norm,
    )
    from torch_ring.collectives.allgather import (
        allgather as allgather,
        allgather_async as allgather_async,
        grouped_allgather as grouped_allgather,
        grouped_allgather_async as grouped_allgather_async,
    )
    from torch_ring.collectives.allreduce import (
        allreduce as allreduce,
        allreduce_ as allreduce_,
        allreduce_async as allreduce_async,
        allreduce_async_ as allreduce_async_,
        any_rank as any_rank,
        grouped_allreduce as grouped_allreduce,
        grouped_allreduce_ as grouped_allreduce_,
        grouped_allreduce_async as grouped_allreduce_async,
        grouped_allreduce_async_ as grouped_allreduce_async_,
    )
    from torch_ring.collectives.alltoall import (
        alltoall as alltoall,
        alltoall_async as alltoall_async,
    )
    from torch_ring.collectives.barrier import barrier as barrier, join as join
    from torch_ring.collectives.broadcast import (
        broadcast as broadcast,
        broadcast_ as broadcast_,
        broadcast_async as broadcast_async,
        broadcast_async_ as broadcast_async_,
    )
    from torch_ring.collectives.compare import verify_consistency as verify_consistency
    from torch_ring.collectives.handle import (
        Handle as Handle,
        poll as poll,
        synchronize as synchronize,
    )
    from torch_ring.collectives.objects import (
        allgather_object as allgather_object,
        broadcast_object as broadcast_object,
    )
    from torch_ring.collectives.reduce_op import (
        Adasum as Adasum,
        Average as Average,
        Band as Band,
        Bor as Bor,
        Bxor as Bxor,
        Max as Max,
        Min as Min,
        Product as Product,
        ReduceOp as ReduceOp,
        Sum as Sum,
    )
    from torch_ring.collectives.reducescatter import (
        grouped_reducescatter as grouped_reducescatter,
        grouped_reducescatter_async as grouped_reducescatter_async,
        reducescatter as reducescatter,
        reducescatter_async as reducescatter_async,
    )
    from torch_ring.collectives.shared_tensors import empty_shared as empty_shared
    from torch_ring.collectives.sparse import sparse_allreduce_async as sparse_allreduce_async
    from torch_ring.compression import Compression as Compression, Compressor as Compressor
    from torch_ring.compression.stateful import (
        ErrorFeedback as ErrorFeedback,
        Gather as Gather,
        Reduce as Reduce,
        StatefulCompressor as StatefulCompressor,
    )
    from torch_ring.errors import (
        HorovodInternalError as HorovodInternalError,
        HostsUpdatedInterrupt as HostsUpdatedInterrupt,
        InvalidArgumentError as InvalidArgumentError,
        MismatchError as MismatchError,
        NonFiniteGradientError as NonFiniteGradientError,
        NotInitializedError as NotInitializedError,
        PeerLostError as PeerLostError,
        RingError as RingError,
        TimeoutError as TimeoutError,
    )
    from torch_ring.mpi_ops import (
        ccl_built as ccl_built,
        check_extension as check_extension,
        cuda_built as cuda_built,
        ddl_built as ddl_built,
        gloo_built as gloo_built,
        gloo_enabled as gloo_enabled,
        mpi_built as mpi_built,
        mpi_enabled as mpi_enabled,
        mpi_threads_supported as mpi_threads_supported,
        nccl_built as nccl_built,
        rocm_built as rocm_built,
    )
    from torch_ring.optimizer import (
        DiLoCo as DiLoCo,
        DistributedOptimizer as DistributedOptimizer,
        LocalSGD as LocalSGD,
    )
    from torch_ring.state import (
        broadcast_buffers as broadcast_buffers,
        broadcast_optimizer_state as broadcast_optimizer_state,
        broadcast_parameters as broadcast_parameters,
    )
    from torch_ring.sync_batch_norm import (
        SyncBatchNorm as SyncBatchNorm,
        convert_sync_batchnorm as convert_sync_batchnorm,
    )
    from torch_ring.tracing.timeline import (
        start_timeline as start_timeline,
        stop_timeline as stop_timeline,
    )
    from torch_ring.world import preemption as preemption
    from torch_ring.world.current import (
        cross_rank as cross_rank,
        cross_size as cross_size,
        init as init,
        is_homogeneous as is_homogeneous,
        is_initialized as is_initialized,
        local_rank as local_rank,
        local_size as local_size,
        rank as rank,
        shutdown as shutdown,
        size as size,
    )
    from torch_ring.world.process_set import (
        ProcessSet as ProcessSet,
        _basics as _basics,
        add_process_set as add_process_set,
        global_process_set as global_process_set,
        hierarchy as hierarchy,
        remove_process_set as remove_process_set,
    )

__version__ = "0.1.0"

# Names of torch.distributed, for the error of a program that looks them up here.
_OURS = {
    "DDP": "DistributedOptimizer()",
    "DistributedDataParallel": "DistributedOptimizer()",
    "all_gather": "allgather()",
    "all_gather_object": "allgather_object()",
    "all_reduce": "allreduce()",
    "all_to_all": "alltoall()",
    "broadcast_object_list": "broadcast_object()",
    "destroy_process_group": "shutdown()",
    "get_local_rank": "local_rank()",
    "get_rank": "rank()",
    "get_world_size": "size()",
    "init_process_group": 'init(), or init_process_group("ring") of torch.distributed',
    "local_world_size": "local_size()",
    "new_group": "add_process_set()",
    "reduce_scatter": "reducescatter()",
    "world_size": "size()",
}

# Before other finders: an older version may have left a `_C` in the package's own folder.
find_native_module()


def _load() -> None:
    """Add the public names to this module.

    Raises:
        ImportError: there is no torch, or no native module for it; says which there are.
    """
    api = importlib.import_module("torch_ring.api")
    for name in ("__all__", *api.__all__):
        globals().setdefault(name, getattr(api, name))  # keep attributes set by a user


if not TYPE_CHECKING:  # a type checker would accept misspelt names as attributes

    def __getattr__(name: str) -> Any:
        # Import only the submodule: `import torch_ring.api` itself looks up submodules here.
        if not name.startswith("__") and importlib.util.find_spec(f"torch_ring.{name}"):
            return importlib.import_module(f"torch_ring.{name}")
        if name == "__all__" or not name.startswith("__"):
            _load()
            if name in globals():
                return globals()[name]
        advice = f": use {_OURS[name]}" if name in _OURS else ""
        raise AttributeError(
            f"module 'torch_ring' has no attribute {name!r}{advice}",
            name=name,
            obj=sys.modules[__name__],
        )


def __dir__() -> list[str]:
    """Return the public names and modules."""
    modules = {"compression", "optimizer", "sync_batch_norm"}  # the others are in __all__
    _load()
    return sorted({*globals()["__all__"], *modules, "__version__"} - {"_basics"})


_torch = sys.modules.get("torch")
# `import torch` itself may import this module, to register the backend of torch_ring/c10d.
if _torch is not None and not getattr(_torch.__spec__, "_initializing", False):
    _load()
