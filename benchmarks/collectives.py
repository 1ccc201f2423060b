"""Times the collectives of torch_ring next to those of torch.distributed's gloo.

    torchrun --nproc-per-node 2 benchmarks/collectives.py
    mpirun -np 2 python benchmarks/collectives.py --collective broadcast --json broadcast.json

The columns are those of nccl-tests; benchmarks/README.md has the formulas.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import torch_ring as hvd

OPS = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum, "prod": torch.mul}
HVD_OPS = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "prod": hvd.Product}
GLOO_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}
# busbw / algbw on so many ranks; README.md says why.
BUS_SHARE: dict[str, Callable[[int], float]] = {
    "allreduce": lambda size: 2 * (size - 1) / size,
    "broadcast": lambda _: 1,
    "allgather": lambda size: (size - 1) / size,
}
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Result:
    """What one library needed for one collective."""

    time_us: float
    algbw: float  # GB/s, as busbw; G is 10^9
    busbw: float
    wrong: int  # elements, on all ranks


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    collective: str
    bytes: int
    count: int
    type: str
    redop: str
    memory: str
    results: dict[str, Result]  # by library
    ratio: float  # gloo's time over torch_ring's


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collective", choices=BUS_SHARE, nargs="+", default=["allreduce"])
    parser.add_argument("--op", choices=OPS, default="sum", help="of allreduce")
    parser.add_argument("--dtype", default="float32", help="torch's name of it")
    parser.add_argument("--min-bytes", type=int, default=1 << 10)
    parser.add_argument("--max-bytes", type=int, default=64 << 20)
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next")
    parser.add_argument("--rounds", type=int, default=9, help="each library is timed once a round")
    parser.add_argument("--iterations", type=int, default=1000, help="in a round, at most")
    parser.add_argument("--shared", action="store_true", help="also tensors in shared memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def start_gloo() -> None:
    """Connect gloo's ranks through torch_ring's, so that any launcher will do."""
    if hvd.cross_size() == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = "127.0.0.1" if hvd.cross_size() == 1 else socket.gethostname()
    if hvd.rank() == 0:
        store = dist.TCPStore(host, 0, hvd.size(), is_master=True, wait_for_workers=False)
        hvd.broadcast_object((host, store.port))
    else:
        host, port = hvd.broadcast_object(None)
        store = dist.TCPStore(host, port, hvd.size(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def runs_of(collective: str, op: str, tensor: Tensor, output: Tensor) -> dict[str, Run]:
    """Return, by library, what runs the collective on `tensor` and returns its result.

    allreduce and broadcast overwrite `tensor`; allgather leaves it, and gloo's fills `output`.
    """

    def gloo(function: Callable[..., object], result: Tensor, *arguments: object) -> Tensor:
        function(*arguments)
        return result

    if collective == "allreduce":
        return {
            "torch_ring": lambda: hvd.allreduce_(tensor, op=HVD_OPS[op]),
            "gloo": lambda: gloo(dist.all_reduce, tensor, tensor, GLOO_OPS[op]),
        }
    if collective == "broadcast":
        return {
            "torch_ring": lambda: hvd.broadcast_(tensor, 0),
            "gloo": lambda: gloo(dist.broadcast, tensor, tensor, 0),
        }
    return {
        "torch_ring": lambda: hvd.allgather(tensor),
        "gloo": lambda: gloo(dist.all_gather_into_tensor, output, output, tensor),
    }


def inputs(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the test data of every rank: small whole numbers, so that any sum is exact."""
    return [(torch.arange(count) % 3 + rank % 2).to(dtype) for rank in range(hvd.size())]


def expected(collective: str, op: str, data: list[Tensor]) -> Tensor:
    if collective == "allreduce":
        return functools.reduce(OPS[op], data)
    return data[0] if collective == "broadcast" else torch.cat(data)


def seconds(run: Run, iterations: int) -> float:
    """Return the time of one iteration on this rank."""
    hvd.barrier()
    started = time.perf_counter()
    for _ in range(iterations):
        run()
    return (time.perf_counter() - started) / iterations


def measure(args: argparse.Namespace, collective: str, size_bytes: int, shared: bool) -> Row:
    """Time one size on both libraries, in turns, and check what they compute."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    parts = hvd.size() if collective == "allgather" else 1
    count = max(1, size_bytes // dtype.itemsize // parts)
    size_bytes = count * parts * dtype.itemsize
    # What DistributedOptimizer's buckets are made of.
    empty = hvd.world.engine().empty_shared if shared else torch.empty
    tensor = empty((count,), dtype=dtype)
    runs = runs_of(collective, args.op, tensor, torch.empty(count * parts, dtype=dtype))

    iterations = min(args.iterations, max(5, (32 << 20) // size_bytes))
    times: dict[str, list[float]] = {library: [] for library in runs}
    for turn in range(args.rounds + 1):
        for library, run in runs.items():
            tensor.zero_()  # sums of zeros stay finite
            elapsed = seconds(run, iterations)
            if turn > 0:  # the first one warms up
                times[library].append(elapsed)

    data = inputs(count, dtype)
    results = {}
    for library, run in runs.items():
        tensor.copy_(data[hvd.rank()])
        wrong = (run() != expected(collective, args.op, data)).sum()
        # Of a round, the slowest rank's time.
        slowest = hvd.allreduce(torch.tensor(times[library], dtype=torch.float64), op=hvd.Max)
        time_s = statistics.median(slowest.tolist())
        algbw = size_bytes / time_s / 1e9
        results[library] = Result(
            time_us=time_s * 1e6,
            algbw=algbw,
            busbw=algbw * BUS_SHARE[collective](hvd.size()),
            wrong=int(hvd.allreduce(wrong, op=hvd.Sum)),
        )
    return Row(
        collective=collective,
        bytes=size_bytes,
        count=count,
        type=args.dtype,
        redop=args.op if collective == "allreduce" else "none",
        memory="shared" if shared else "private",
        results=results,
        ratio=results["gloo"].time_us / results["torch_ring"].time_us,
    )


def machine() -> dict[str, str | int]:
    """Return what the numbers depend on."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "torch_ring": hvd.__version__,
        "ranks": hvd.size(),
        "hosts": hvd.cross_size(),
    }


def header(collective: str) -> Iterator[str]:
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    yield f"# {collective}; {facts}"
    yield f"#{'':49}{'torch_ring':>38}{'gloo':>38}"
    columns = f"{'time':>11}{'algbw':>9}{'busbw':>9}{'#wrong':>9}" * 2
    yield f"#{'size':>11}{'count':>11}{'type':>10}{'redop':>7}{'memory':>9} {columns}{'ratio':>8}"
    columns = f"{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}{'':>9}" * 2
    yield f"#{'(B)':>11}{'(elements)':>11}{'':26} {columns.rstrip()}"


def line(row: Row) -> str:
    text = f"{row.bytes:>12}{row.count:>11}{row.type:>10}{row.redop:>7}{row.memory:>9} "
    for result in row.results.values():
        text += f"{result.time_us:>11.1f}{result.algbw:>9.2f}{result.busbw:>9.2f}{result.wrong:>9}"
    return f"{text}{row.ratio:>8.2f}"


def rows_of(args: argparse.Namespace, collective: str) -> Iterator[Row]:
    size_bytes = args.min_bytes
    while size_bytes <= args.max_bytes:
        yield measure(args, collective, size_bytes, shared=False)
        if args.shared:
            yield measure(args, collective, size_bytes, shared=True)
        size_bytes *= args.factor


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)  # a rank has a core; gloo's sums would use more
    hvd.init()
    start_gloo()
    log = functools.partial(print, flush=True) if hvd.rank() == 0 else lambda *_, **__: None
    rows = []
    for collective in args.collective:
        log(*header(collective), sep="\n")
        for row in rows_of(args, collective):
            log(line(row))
            rows.append(row)
    if hvd.rank() == 0 and args.json:
        report = {"command": shlex.join(sys.argv), "machine": machine(), "rows": rows}
        args.json.write_text(json.dumps(report, default=asdict, indent=1) + "\n")
    dist.destroy_process_group()
    hvd.shutdown()
    return int(any(result.wrong for row in rows for result in row.results.values()))


if __name__ == "__main__":
    sys.exit(main())
