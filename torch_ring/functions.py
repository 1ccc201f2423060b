"""What makes ranks alike where horovod.torch keeps it; :mod:`torch_ring.state` is its home here."""

from torch_ring.collectives.objects import allgather_object, broadcast_object
from torch_ring.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
