"""torch_ring: one PyTorch model on many processes.

``import torch_ring as hvd`` runs scripts written for ``horovod.torch``.
"""

from torch_ring.errors import check_build

check_build()

from torch_ring.compression import Compression, Compressor  # noqa: E402
from torch_ring.errors import (  # noqa: E402
    HorovodInternalError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RingError,
    TimeoutError,
)
from torch_ring.handle import Handle, poll, synchronize  # noqa: E402
from torch_ring.ops import (  # noqa: E402
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from torch_ring.optimizer import DistributedOptimizer  # noqa: E402
from torch_ring.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum  # noqa: E402
from torch_ring.state import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from torch_ring.stateful import ErrorFeedback, Gather, Reduce, StatefulCompressor  # noqa: E402
from torch_ring.world import (  # noqa: E402
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

__version__ = "0.1.0"

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "ErrorFeedback",
    "Gather",
    "Handle",
    "HorovodInternalError",
    "InvalidArgumentError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "Product",
    "Reduce",
    "ReduceOp",
    "RingError",
    "StatefulCompressor",
    "Sum",
    "TimeoutError",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
