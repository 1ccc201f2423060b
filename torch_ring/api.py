# SPDX-License-Identifier: Apache-2.0
"""The public names of torch_ring: its table of contents, which needs torch.

`torch_ring/__init__.py` re-exports them when the first of them is used, or at once if torch is
imported already. The last lines register the backend ``ring`` with torch.distributed and, if the
settings say so, start the flight recorder and the export of counters.
"""

from torch_ring import checkpoint, data, elastic, functions, lr_schedules, metrics, mpi_ops
from torch_ring.c10d.registration import register_backend
from torch_ring.compression import Compressor
from torch_ring.compression.stateful import ErrorFeedback, Gather, Reduce, StatefulCompressor
from torch_ring.errors import (
    HostsUpdatedInterrupt,
    InvalidArgumentError,
    MismatchError,
    NonFiniteGradientError,
    NotInitializedError,
    PeerLostError,
    RingError,
    TimeoutError,
)
from torch_ring.mpi_ops import *
from torch_ring.optimizer import DiLoCo, DistributedOptimizer, LocalSGD
from torch_ring.state import broadcast_buffers, broadcast_optimizer_state, broadcast_parameters
from torch_ring.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from torch_ring.tracing.exporter import export_metrics
from torch_ring.tracing.flight_recorder import trace_process
from torch_ring.tracing.timeline import start_timeline, stop_timeline
from torch_ring.world import preemption

__all__ = [
    "Compressor",
    "DiLoCo",
    "DistributedOptimizer",
    "ErrorFeedback",
    "Gather",
    "HostsUpdatedInterrupt",
    "InvalidArgumentError",
    "LocalSGD",
    "MismatchError",
    "NonFiniteGradientError",
    "NotInitializedError",
    "PeerLostError",
    "Reduce",
    "RingError",
    "StatefulCompressor",
    "SyncBatchNorm",
    "TimeoutError",
    "broadcast_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpoint",
    "convert_sync_batchnorm",
    "data",
    "elastic",
    "functions",
    "lr_schedules",
    "metrics",
    "mpi_ops",
    "preemption",
    "start_timeline",
    "stop_timeline",
]
__all__ += mpi_ops.__all__

register_backend()
trace_process()
export_metrics()
