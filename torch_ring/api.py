"""The public names of torch_ring: its table of contents, which needs torch.

`torch_ring/__init__.py` hands them on when the first of them is used, or at once where torch has
been imported. Its last lines make the backend ``ring`` known to torch.distributed, and see to it
that errors leave a trace, and counters are exported, where the user wants that.
"""

from torch_ring import (
    checkpoint,
    data,
    elastic,
    functions,
    lr_schedules,
    metrics,
    mpi_ops,
)
from torch_ring.c10d.registration import register_backend
from torch_ring.capabilities import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from torch_ring.collectives.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from torch_ring.collectives.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    any_rank,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from torch_ring.collectives.alltoall import alltoall, alltoall_async
from torch_ring.collectives.barrier import barrier, join
from torch_ring.collectives.broadcast import (
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from torch_ring.collectives.compare import verify_consistency
from torch_ring.collectives.handle import Handle, poll, synchronize
from torch_ring.collectives.objects import allgather_object, broadcast_object
from torch_ring.collectives.reduce_op import (
    Adasum,
    Average,
    Band,
    Bor,
    Bxor,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
)
from torch_ring.collectives.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from torch_ring.collectives.shared_tensors import empty_shared
from torch_ring.collectives.sparse import sparse_allreduce_async
from torch_ring.compression import Compression, Compressor
from torch_ring.compression.stateful import ErrorFeedback, Gather, Reduce, StatefulCompressor
from torch_ring.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RingError,
    TimeoutError,
)
from torch_ring.optimizer import DistributedOptimizer
from torch_ring.state import (
    broadcast_buffers,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from torch_ring.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from torch_ring.tracing.exporter import export_metrics
from torch_ring.tracing.flight_recorder import trace_process
from torch_ring.tracing.timeline import start_timeline, stop_timeline
from torch_ring.world import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from torch_ring.world.process_set import (
    ProcessSet,
    _basics,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "Adasum",
    "Average",
    "Band",
    "Bor",
    "Bxor",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "ErrorFeedback",
    "Gather",
    "Handle",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "InvalidArgumentError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "Reduce",
    "ReduceOp",
    "RingError",
    "StatefulCompressor",
    "Sum",
    "SyncBatchNorm",
    "TimeoutError",
    "_basics",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "any_rank",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_buffers",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "checkpoint",
    "convert_sync_batchnorm",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "elastic",
    "empty_shared",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "lr_schedules",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "verify_consistency",
]

register_backend()
trace_process()
export_metrics()
