# SPDX-License-Identifier: Apache-2.0
"""The libraries that collectives.py compares, behind one interface: a call on given tensors."""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_ring as hvd

HVD_OPS = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "prod": hvd.Product}
C10D_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """One collective on one tensor.

    allreduce and broadcast (from rank 0) overwrite `tensor`; the others leave it. `output` has the
    result's size, for libraries that take an output.
    """

    collective: str
    op: str
    tensor: Tensor
    output: Tensor


def empty_shared(count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the host's shared memory, as the optimizer's buckets are."""
    return hvd.empty_shared(count, dtype=dtype)


# --- torch_ring


def of_torch_ring(case: Case) -> Run:
    tensor, op = case.tensor, HVD_OPS[case.op]
    return {
        "allreduce": lambda: hvd.allreduce_(tensor, op=op),
        "broadcast": lambda: hvd.broadcast_(tensor, 0),
        "allgather": lambda: hvd.allgather(tensor),
        "reducescatter": lambda: hvd.reducescatter(tensor, op=op),
        "alltoall": lambda: hvd.alltoall(tensor),
    }[case.collective]


# --- torch.distributed, with the backends gloo and ring


def start_gloo() -> None:
    """Make torch.distributed's default group, of gloo, if there is none.

    It is connected through torch_ring's ranks, so that any launcher works.
    """
    if dist.is_initialized():
        return
    alone = hvd.cross_size() == 1
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if hvd.rank() == 0:
        host = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR", socket.gethostname())
        store = dist.TCPStore(host, 0, hvd.size(), is_master=True, wait_for_workers=False)
        hvd.broadcast_object((host, store.port))
    else:
        host, port = hvd.broadcast_object(None)
        store = dist.TCPStore(host, port, hvd.size(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def stop_gloo() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def group_of(backend: str) -> Any:
    """Return a group of all ranks. Collective, once for each backend."""
    if backend == "fake":
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
    return dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)


def of_distributed(backend: str, case: Case) -> Run:
    tensor, output, op, group = case.tensor, case.output, C10D_OPS[case.op], group_of(backend)
    call, result = {
        "allreduce": (lambda: dist.all_reduce(tensor, op, group), tensor),
        "broadcast": (lambda: dist.broadcast(tensor, 0, group), tensor),
        "allgather": (lambda: dist.all_gather_into_tensor(output, tensor, group), output),
        "reducescatter": (lambda: dist.reduce_scatter_tensor(output, tensor, op, group), output),
        "alltoall": (lambda: dist.all_to_all_single(output, tensor, group=group), output),
    }[case.collective]
    return _returning(call, result)


# --- MPI


def start_mpi() -> None:
    """Join MPI's world, if mpirun has started these ranks."""
    problem = None
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", 0)) != hvd.size():
        problem = (
            "--peers mpi compares with Open MPI, whose ranks only mpirun can start: "
            f"mpirun --bind-to none -np {hvd.size()} python benchmarks/collectives.py --peers mpi"
        )
    else:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            problem = f"--peers mpi needs mpi4py and a library of MPI: {error}"
    exit_if_any(problem)
    assert MPI.COMM_WORLD.size == hvd.size()


def of_mpi(case: Case) -> Run | None:
    """Return the case's MPI run; None for 16-bit floats, which MPI has no type for."""
    from mpi4py import MPI

    kinds = {
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.int32: MPI.INT32_T,
        torch.int64: MPI.INT64_T,
        torch.int8: MPI.INT8_T,
        torch.uint8: MPI.UINT8_T,
    }
    kind = kinds.get(case.tensor.dtype)
    if kind is None:
        return None
    op = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}[case.op]
    world, tensor, output = MPI.COMM_WORLD, [case.tensor.numpy(), kind], [case.output.numpy(), kind]
    call, result = {
        "allreduce": (lambda: world.Allreduce(MPI.IN_PLACE, tensor, op), case.tensor),
        "broadcast": (lambda: world.Bcast(tensor, 0), case.tensor),
        "allgather": (lambda: world.Allgather(tensor, output), case.output),
        "reducescatter": (lambda: world.Reduce_scatter_block(tensor, output, op), case.output),
        "alltoall": (lambda: world.Alltoall(tensor, output), case.output),
    }[case.collective]
    return _returning(call, result)


# --- DeepSpeed's kernel for the ranks of one host


@functools.cache
def shm_kernel() -> Any:
    """Return the kernel, which DeepSpeed compiles in minutes and keeps for later programs."""
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    return ShareMemCommBuilder().load(verbose=False)


def start_deepspeed() -> None:
    """Compile and connect the kernel."""
    problem = None
    if hvd.cross_size() > 1:
        problem = "--peers deepspeed compares with a kernel for the ranks of one host"
    else:
        try:
            shm_kernel().vector_kernel_level()
        except Exception as error:
            problem = f"--peers deepspeed needs deepspeed, ninja and a compiler: {error}"
    exit_if_any(problem)
    # Without LOCAL_SIZE the kernel stays unconnected, and its first call crashes.
    os.environ["LOCAL_SIZE"] = str(hvd.size())
    shm_kernel().initialize(hvd.size(), hvd.rank())
    hvd.barrier()  # every rank has mapped all memory, whose files DeepSpeed never removes
    job = "_".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{job}_{hvd.rank()}"
    Path("/dev/shm", name).unlink()


def of_deepspeed(case: Case) -> Run | None:
    """Return the kernel's run; None for cases that it cannot sum on this processor."""
    # DeepSpeed checks these levels before its call: 1 is AVX2, 2 is AVX-512.
    levels = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 2}
    is_sum = case.collective == "allreduce" and case.op == "sum"
    if not is_sum or levels.get(case.tensor.dtype, 3) > shm_kernel().vector_kernel_level():
        return None
    return functools.partial(torch.ops.deepspeed.inference_all_reduce_, case.tensor)


# --- limits of memory


def of_copy(case: Case) -> Run:
    """Return a copy of the same size, divided among the ranks: no allreduce is much faster.

    All ranks at once copy one part of `tensor` each, from one private buffer to another.
    """
    count = max(case.tensor.numel(), case.output.numel()) // hvd.size()
    source = torch.zeros(count, dtype=case.tensor.dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def of_touch(case: Case) -> Run:
    """Return the least work of any library: a rank reads its input once and writes its result.

    All ranks at once do this from private memory to private memory, without data from a peer.
    Reductions do their arithmetic.
    """
    count, dtype = case.tensor.numel(), case.tensor.dtype
    own = torch.zeros(count, dtype=dtype)
    if case.collective == "allreduce":
        return own.neg_
    if case.collective == "broadcast":  # the root only reads, which is less
        return (lambda: own) if hvd.rank() == 0 else own.zero_
    result = torch.zeros(case.output.numel(), dtype=dtype)
    if case.collective == "reducescatter":
        first, *others = own.chunk(hvd.size())

        def reduce() -> Tensor:
            torch.add(first, others[0], out=result) if others else result.copy_(first)
            for other in others[1:]:
                result.add_(other)
            return result

        return reduce
    source = torch.zeros_like(result)  # as many bytes as the ranks' parts together
    return lambda: result.copy_(source)


# --- all of them


@dataclass(frozen=True)
class Library:
    """One library: how to start it, run a collective (None: it cannot), and stop it."""

    of: Callable[[Case], Run | None]
    start: Callable[[], None] = lambda: None
    stop: Callable[[], None] = lambda: None


PEERS = {
    "gloo": Library(functools.partial(of_distributed, "gloo"), start_gloo, stop_gloo),
    "ring-c10d": Library(functools.partial(of_distributed, "ring"), start_gloo, stop_gloo),
    "fake-c10d": Library(functools.partial(of_distributed, "fake"), start_gloo, stop_gloo),
    "mpi": Library(of_mpi, start_mpi),
    "deepspeed": Library(of_deepspeed, start_deepspeed),
    "copy": Library(of_copy),
    "touch": Library(of_touch),
}
MEMORY = ("copy", "touch", "fake-c10d")  # no collectives: they have no result


def runs_of(case: Case, peers: Sequence[str]) -> dict[str, Run]:
    """Return, by library, a function that runs the collective and returns its result."""
    runs: dict[str, Run | None] = {"torch_ring": of_torch_ring(case)}
    runs |= {peer: PEERS[peer].of(case) for peer in peers}
    return {library: run for library, run in runs.items() if run}


def _returning(call: Callable[[], Any], result: Tensor) -> Run:
    def run() -> Tensor:
        call()
        return result

    return run


def exit_if_any(problem: str | None) -> None:
    """End all ranks if one of them has a problem. Collective."""
    problems = dict.fromkeys(text for text in hvd.allgather_object(problem) if text)
    if problems:
        sys.exit("\n".join(problems) if hvd.rank() == 0 else 1)
