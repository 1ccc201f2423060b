# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of a host share: one makes it, the others open it."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

if sys.platform != "win32":
    import fcntl

__all__ = ["Home", "Segment", "Spec", "share_memory"]

_LINE = 64  # bytes
_AT_ONCE = 1 << 20  # bytes allocated in one call: a signal makes the system undo the call


class Spec(NamedTuple):
    """Shape, strides and dtype of a tensor, as the ranks exchange them."""

    shape: list[int]
    stride: list[int]
    dtype: str

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        """Return the spec of a tensor whose elements fill their memory."""
        stride = torch.empty_like(tensor, device="meta").stride()
        return Spec(list(tensor.shape), list(stride), str(tensor.dtype).removeprefix("torch."))

    def in_memory(self, memory: mmap.mmap, offset: int) -> Tensor:
        """Return a tensor in the memory, and keep the memory alive."""
        dtype = self.torch_dtype
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        return flat.as_strided(self.shape, self.stride)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


class Segment:
    """Shared memory of a host, which one rank makes and the others open: a memfd without a name.

    Each rank maps it twice: for the step, and privately for the program. A page that the program
    has not written shows what the owners have stepped; one that it has written is the rank's own.
    The first page begins with a unique token, and the data with the second one.

    The system frees it with the last tensor of the last process, even if processes are killed.

    Args:
        fd: the rank's descriptor, to be closed by `close`. The mappings have their own.
        token: the memory's token.

    Attributes:
        token: as above.
        program: the private mapping.
        address: its address.
        pages: the number of its pages.
    """

    def __init__(self, fd: int, token: bytes) -> None:
        self._fd = fd
        self.token = token
        self._memory = mmap.mmap(fd, 0)
        self.program = mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
        self.program[: len(token)] = token  # a page known to be written: see written_pages()
        self.address = torch.frombuffer(self.program, dtype=torch.uint8).data_ptr()
        self.pages = -(-len(self._memory) // mmap.PAGESIZE)
        self._entries = bytearray(8 * self.pages)

    @staticmethod
    def make(nbytes: int) -> Segment:
        """Make memory. Raises OSError if the host has no more."""
        fd = os.memfd_create("torch_ring.sharded", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for begin in range(0, nbytes, _AT_ONCE):
                os.posix_fallocate(fd, begin, min(_AT_ONCE, nbytes - begin))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            token = secrets.token_bytes(16)
            os.pwrite(fd, token, 0)
            return Segment(fd, token)
        except BaseException:
            os.close(fd)
            raise

    def offer(self) -> tuple[int, int, str]:
        """Return the arguments of `open` for another process of this user."""
        return os.getpid(), self._fd, self.token.hex()

    @staticmethod
    def open(offer: Sequence[Any]) -> Segment:
        """Open the memory that another process offers. Raises OSError."""
        pid, number, token = offer
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(fd, 16, 0) != bytes.fromhex(token):
                raise OSError(f"/proc/{pid}/fd/{number} is something else: other containers?")
            return Segment(fd, bytes.fromhex(token))
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the descriptor; tensors keep the mappings."""
        os.close(self._fd)

    def home(self, spec: Spec, offset: int) -> Home:
        """Return a place for a tensor."""
        program = spec.in_memory(self.program, offset)
        return Home(self, offset, program, spec.in_memory(self._memory, offset))

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor begins in the program's mapping."""
        return 0 <= tensor.data_ptr() - self.address < len(self.program)

    def written_pages(self) -> Tensor:
        """Return the numbers of the pages that may be this process's own copies, in order."""
        entries = torch.frombuffer(self._entries, dtype=torch.uint8)
        entries.zero_()
        with contextlib.suppress(OSError):  # no /proc
            table = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            try:
                begin = 8 * (self.address // mmap.PAGESIZE)
                if os.preadv(table, [self._entries], begin) < len(self._entries):
                    entries.zero_()
            finally:
                os.close(table)
        kinds = entries[7::8] >> 5  # bits: 4 in memory, 2 swapped out, 1 the file's own page
        is_own = (kinds > 0) & (kinds & 1 == 0)
        if not is_own[0]:  # the system does not tell
            is_own.fill_(True)
        is_own[0] = False
        return is_own.nonzero().flatten()

    def drop(self, pages: Tensor) -> None:
        """Give up this process's copies of pages: the program sees the shared memory there."""
        gaps = (pages.diff() > 1).nonzero().flatten() + 1
        for run in torch.tensor_split(pages, gaps.tolist()):
            begin, end = int(run[0]) * mmap.PAGESIZE, (int(run[-1]) + 1) * mmap.PAGESIZE
            try:
                self.program.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            except OSError:  # mlockall(): the copies stay, and are written anew after each step
                self.program[begin:end] = self._memory[begin:end]


class Home(NamedTuple):
    """The place of a tensor in shared memory."""

    segment: Segment
    offset: int
    program: Tensor  # in the program's mapping
    shared: Tensor  # the same memory as the owners of its parts write it

    def address(self) -> tuple[str, int]:
        """Return the token and the offset, which all ranks of the host have."""
        return self.segment.token.hex(), self.offset

    def has_been_left(self) -> bool:
        """Return whether torch has moved the program's tensor, with its storage."""
        return self.program.nbytes > 0 and (
            self.program.data_ptr() != self.segment.address + self.offset
        )

    def taken_again(self) -> Home:
        """Return the place with a new tensor for the program."""
        program = Spec.of(self.program).in_memory(self.segment.program, self.offset)
        return self._replace(program=program)

    def is_on(self, counts: Sequence[int]) -> bool:
        """Return whether a page of the tensor is among those counted up to each page."""
        nbytes = self.program.nbytes
        first, last = self.offset // mmap.PAGESIZE, (self.offset + nbytes - 1) // mmap.PAGESIZE
        return nbytes > 0 and counts[last] > counts[first - 1]


def share_memory(
    layout: Sequence[Spec],
    holder: int,
    values: Sequence[Tensor | None] | None,
    ranks: Sequence[int],
    rank: int,
    exchange: Callable[[Any], list[Any]],
) -> list[Home]:
    """Return places for tensors in memory that one rank makes for its host. Collective.

    Args:
        layout: the specs of the tensors, the same on all ranks of the host.
        holder: the rank of this host that makes the memory.
        values: on the holder, the values of the tensors; None: undefined values.
        ranks: the ranks that call, on all hosts.
        rank: this one.
        exchange: returns the values of all ranks, in their order.

    Raises:
        OSError: on all ranks: one of them cannot share memory.
    """
    offsets = []
    end = mmap.PAGESIZE
    for spec in layout:
        offsets.append(end)
        end += -(-spec.nbytes // _LINE) * _LINE
    segment: Segment | None = None
    made: list[Home] = []
    problem = ""
    try:
        try:
            if rank == holder and layout:
                segment = Segment.make(end)
                made += map(segment.home, layout, offsets)
                for home, value in zip(made, values or (), strict=False):
                    if value is not None:
                        home.shared.copy_(value)
        except (OSError, ValueError) as error:
            problem = f"rank {rank} cannot make {end} bytes: {error}"
        offers = exchange(None if problem or segment is None else segment.offer())
        offer = offers[ranks.index(holder)]
        try:
            if rank != holder and layout and offer is not None:
                segment = Segment.open(offer)
                made += map(segment.home, layout, offsets)
        except (OSError, ValueError) as error:
            problem = f"rank {rank} cannot open the memory of rank {holder}: {error}"
        problems = [each for each in exchange(problem) if each]
    finally:
        if segment is not None:
            segment.close()
    if problems:
        raise OSError(problems[0])
    return made
