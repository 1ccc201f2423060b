"""allreduce and the other operations under horovod.torch's module name: ``hvd.mpi_ops.Sum``."""

from torch_ring import capabilities, collectives, world
from torch_ring.capabilities import *
from torch_ring.collectives import *
from torch_ring.compression import Compression
from torch_ring.errors import HorovodInternalError
from torch_ring.world import *

__all__ = ["Compression", "HorovodInternalError"]
__all__ += capabilities.__all__
__all__ += collectives.__all__
__all__ += world.__all__
