# SPDX-License-Identifier: Apache-2.0
"""Collective operations on tensors, one module for each.

Every rank of the process set calls the same operations. Operations with a name may be submitted in
any order; those without are numbered, so their order must be the same on all ranks. Tensors are
dense, on the CPU or on a GPU.

broadcast, allgather and alltoall move every dtype of numbers: uint8 to uint64, int8 to int64,
float16, bfloat16, float32, float64, the float8 kinds, complex32, complex64, complex128, and bool.
allreduce and reducescatter compute with uint8, int8, int16, int32, int64, float16, bfloat16,
float32 and float64; Sum and Average also with complex64 and complex128; Min, Max and Product also
with bool; Band, Bor and Bxor with integers and bool alone.

Raised by all of them, on every rank:

* :class:`NotInitializedError` before :func:`torch_ring.init`;
* ``ValueError`` for an argument that is wrong on this rank, before anything is sent;
* :class:`MismatchError` when the ranks call different operations, or some have called
  :func:`join` and the operation needs them; the job may go on;
* :class:`PeerLostError` when a rank is gone or silent, :class:`TimeoutError` when one is late.

Open first: `allreduce`, which the other modules follow; `handle` is the pending result.
"""

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

__all__ = [
    "Adasum",
    "Average",
    "Band",
    "Bor",
    "Bxor",
    "Handle",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
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
    "broadcast_object",
    "empty_shared",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
    "verify_consistency",
]
