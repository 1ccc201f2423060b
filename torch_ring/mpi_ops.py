# SPDX-License-Identifier: Apache-2.0
"""allreduce and the other operations under horovod.torch's module name: ``hvd.mpi_ops.Sum``.

Also Horovod's capability queries, ``mpi_built``, ``nccl_built`` and others, answered as its scripts
expect.
"""

import torch

from torch_ring import collectives, world
from torch_ring._C import nccl_version
from torch_ring.collectives import *
from torch_ring.compression import Compression
from torch_ring.config import Config
from torch_ring.errors import HorovodInternalError, InvalidArgumentError
from torch_ring.world import *

__all__ = [
    "Compression",
    "HorovodInternalError",
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]
__all__ += collectives.__all__
__all__ += world.__all__


def mpi_built() -> bool:
    """Return False: no collective uses MPI, even if mpirun started the ranks."""
    return False


def mpi_enabled() -> bool:
    """Return False: no collective uses MPI, even if mpirun started the ranks."""
    return False


def mpi_threads_supported() -> bool:
    """Return True: a program may call MPI (mpi4py) beside torch_ring, from any thread.

    Raises:
        NotInitializedError: before init(), as in Horovod.
    """
    world.size()
    return True


def gloo_built() -> bool:
    """Return True: scripts ask it to know whether CPU collectives work without MPI.

    The collectives are torch_ring's own, not Gloo's.
    """
    return True


def gloo_enabled() -> bool:
    """Return True: scripts ask it to know whether CPU collectives work without MPI."""
    return True


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:  # noqa: ARG001
    """Raise ImportError if there are no collectives for a framework: Horovod's name.

    Args:
        ext_name: as ``"horovod.torch"``, for which there are.
        ext_env_var: ignored.
        pkg_path: ignored.
        args: ignored.
    """
    if ext_name not in ("horovod.torch", "torch_ring"):
        raise ImportError(f"torch_ring takes the place of horovod.torch, and has no {ext_name}")


def nccl_built() -> int:
    """Return NCCL's version code, as Horovod does (22703 is 2.27.3), or 0.

    0 means that this torch has no CUDA, or that NCCL was not found: it is loaded at run time.
    """
    if not cuda_built():
        return 0
    try:
        return nccl_version(Config.from_environment().nccl_library)
    except InvalidArgumentError:
        return 0


def cuda_built() -> bool:
    """Return whether this torch has CUDA, all that collectives on GPUs need at build time."""
    return torch.version.cuda is not None


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False


def rocm_built() -> bool:
    """Return False: AMD's ROCm is not used."""
    return False
