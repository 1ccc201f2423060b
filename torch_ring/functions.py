# SPDX-License-Identifier: Apache-2.0
"""broadcast_parameters and the like, under the module name that horovod.torch gives them."""

from torch_ring.collectives.objects import allgather_object, broadcast_object
from torch_ring.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
