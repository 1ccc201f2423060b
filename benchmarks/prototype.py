"""Prototype: runs prototype.cc, the bare collectives of private tensors on one host."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from torch import Tensor

import torch_ring as hvd

SOURCE = Path(__file__).with_suffix(".cc")
RANKS = 2
COMPILER = shlex.split(os.environ.get("CXX", "g++"))


class Prototype:
    """The loaded program and its memory, which two ranks of a host share. Collective."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:  # rank 0's, until both have loaded it
            path = hvd.broadcast_object(compiled(Path(folder)) if hvd.rank() == 0 else None)
            self._library = ctypes.CDLL(path)
            hvd.barrier()
        self._library.memory_bytes.restype = ctypes.c_size_t
        size_bytes = self._library.memory_bytes()
        fd = os.memfd_create("prototype") if hvd.rank() == 0 else None
        if fd is not None:
            os.posix_fallocate(fd, 0, size_bytes)
        name = hvd.broadcast_object(None if fd is None else f"/proc/{os.getpid()}/fd/{fd}")
        with open(name, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size_bytes)
        hvd.barrier()
        if fd is not None:
            os.close(fd)
        self._address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))

    def run(self, collective: str, tensor: Tensor) -> Tensor:
        """Sum a float32 tensor in place ("allreduce"), or receive rank 0's ("broadcast")."""
        getattr(self._library, collective)(
            self._address,
            hvd.rank(),
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_size_t(tensor.numel()),
        )
        return tensor


def is_possible() -> bool:
    """Return whether this machine can compile and run it, for two ranks of one host."""
    here = hvd.size() == hvd.local_size() == RANKS
    return here and platform.machine() == "x86_64" and shutil.which(COMPILER[0]) is not None


def compiled(folder: Path) -> str:
    """Return the path of the program, compiled for this processor."""
    library = folder / "prototype.so"
    flags = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([*COMPILER, *flags, str(SOURCE), "-o", str(library)], check=True)
    return str(library)
