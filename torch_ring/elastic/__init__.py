# SPDX-License-Identifier: Apache-2.0
"""Elastic training: ranks may die, and the others go on with the step that failed.

Horovod's names: ``run``, ``State``, ``ObjectState``, ``TorchState``, ``ElasticSampler``.

Open first: `retry` (`run`), then `job` and `state`.
"""

from torch_ring.elastic.retry import run
from torch_ring.elastic.sampler import ElasticSampler
from torch_ring.elastic.state import ObjectState, State, StateLostError, TorchState
from torch_ring.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    ProcessSetLostError,
    StateDamagedError,
)

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "ProcessSetLostError",
    "State",
    "StateDamagedError",
    "StateLostError",
    "TorchState",
    "run",
]
