# SPDX-License-Identifier: Apache-2.0
"""Times the collectives of torch_ring next to those of other libraries, in one run.

    torchrun --nproc-per-node 2 benchmarks/collectives.py --peers gloo copy touch --shared
    torchrun --nproc-per-node 2 benchmarks/collectives.py --peers ring-c10d fake-c10d gloo
    torchrun --nproc-per-node 2 benchmarks/collectives.py --peers deepspeed --min-bytes 256
    mpirun --bind-to none -np 2 python benchmarks/collectives.py --peers gloo mpi

The columns are those of nccl-tests; benchmarks/README.md has the formulas.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import log, machine, title, write_report
from peers import MEMORY, PEERS, Case, Run, empty_shared, runs_of
from torch import Tensor
from turns import in_turns, medians, seconds

import torch_ring as hvd

OPS = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum, "prod": torch.mul}
DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64"]
# busbw / algbw by the number of ranks; README.md says why.
BUS_SHARE: dict[str, Callable[[int], float]] = {
    "allreduce": lambda size: 2 * (size - 1) / size,
    "broadcast": lambda _: 1,
    "allgather": lambda size: (size - 1) / size,
    "reducescatter": lambda size: (size - 1) / size,
    "alltoall": lambda size: (size - 1) / size,
}
ROUND_BYTES = 32 << 20  # moved by a library in a round, if the iterations allow
MIN_ITERATIONS = 5


@dataclass(frozen=True)
class Result:
    """One library's result for one collective."""

    time_us: float
    algbw: float  # GB/s, as busbw; G is 10^9
    busbw: float
    wrong: int  # elements, on all ranks


@dataclass(frozen=True)
class Row:
    """The results of one collective on one kind of tensor."""

    collective: str
    bytes: int
    count: int
    type: str
    redop: str
    memory: str
    results: dict[str, Result]  # by library
    ratios: dict[str, float]  # a peer's time over torch_ring's


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collective", choices=BUS_SHARE, nargs="+", default=["allreduce"])
    parser.add_argument("--op", choices=OPS, default="sum", help="of allreduce")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=["float32"])
    parser.add_argument("--peers", choices=PEERS, nargs="*", default=["gloo"])
    parser.add_argument("--min-bytes", type=int, default=1 << 10)
    parser.add_argument("--max-bytes", type=int, default=64 << 20)
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next")
    parser.add_argument("--rounds", type=int, default=9, help="each library is timed once a round")
    parser.add_argument("--iterations", type=int, default=1000, help="in a round, at most")
    parser.add_argument("--shared", action="store_true", help="also tensors in shared memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args()


def make_case(
    collective: str, op: str, size_bytes: int, dtype: torch.dtype, memory: str
) -> tuple[Case, int]:
    """Return the case for about `size_bytes` bytes, and its exact number of bytes."""
    size = hvd.size()
    gathers, divides = collective == "allgather", collective in ("reducescatter", "alltoall")
    count = size_bytes // dtype.itemsize  # of the larger of input and output
    count = max(1, count // size) * size if gathers or divides else max(1, count)
    inputs = count // size if gathers else count
    outputs = count // size if collective == "reducescatter" else count
    tensor = empty_shared(inputs, dtype) if memory == "shared" else torch.empty(inputs, dtype=dtype)
    op = op if collective == "allreduce" else "sum"
    return Case(collective, op, tensor, torch.empty(outputs, dtype=dtype)), count * dtype.itemsize


def inputs(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the test data of every rank: small whole numbers, so that any sum is exact."""
    return [(torch.arange(count) % 3 + rank % 2).to(dtype) for rank in range(hvd.size())]


def expected(case: Case, data: list[Tensor]) -> Tensor:
    def parts(tensor: Tensor) -> Tensor:
        return tensor.view(hvd.size(), -1)

    if case.collective == "broadcast":
        return data[0]
    if case.collective == "allgather":
        return torch.cat(data)
    if case.collective == "alltoall":
        return torch.cat([parts(tensor)[hvd.rank()] for tensor in data])
    reduced = functools.reduce(OPS[case.op], data)
    return reduced if case.collective == "allreduce" else parts(reduced)[hvd.rank()]


def wrong_elements(case: Case, runs: dict[str, Run]) -> dict[str, int]:
    """Return, by library, the number of wrong elements of the results, on all ranks."""
    data = inputs(case.tensor.numel(), case.tensor.dtype)
    want = expected(case, data)
    wrong = {}
    for library, run in runs.items():
        case.tensor.copy_(data[hvd.rank()])
        got = run()
        differing = 0 if library in MEMORY else int((got != want).sum())
        wrong[library] = int(hvd.allreduce(torch.tensor(differing), op=hvd.Sum))
    return wrong


def measure(args: argparse.Namespace, collective: str, size_bytes: int) -> list[Row]:
    """Check and time one size: all dtypes, memories and libraries in turns."""
    kinds = list(itertools.product(args.dtypes, ["private", "shared"][: 1 + args.shared]))
    cases, wrong, timed = {}, {}, {}
    for name, memory in kinds:
        case, actual_bytes = make_case(
            collective, args.op, size_bytes, getattr(torch, name), memory
        )
        runs = runs_of(case, args.peers)
        cases[name, memory] = case, actual_bytes
        wrong[name, memory] = wrong_elements(case, runs)
        case.tensor.zero_()  # sums of zeros stay finite
        iterations = min(args.iterations, max(MIN_ITERATIONS, ROUND_BYTES // actual_bytes))
        timed |= {
            (name, memory, library): functools.partial(
                seconds, run, iterations, untimed=(iterations + 1) // 2
            )
            for library, run in runs.items()
        }
    times = medians(in_turns(timed, args.rounds))

    rows = []
    for (name, memory), (case, actual_bytes) in cases.items():
        results = {}
        for library in wrong[name, memory]:
            time_s = times[name, memory, library]
            algbw = actual_bytes / time_s / 1e9
            busbw = algbw * (1 if library in MEMORY else BUS_SHARE[collective](hvd.size()))
            results[library] = Result(time_s * 1e6, algbw, busbw, wrong[name, memory][library])
        ours = results["torch_ring"].time_us
        ratios = {
            peer: result.time_us / ours for peer, result in results.items() if peer != "torch_ring"
        }
        redop = case.op if collective in ("allreduce", "reducescatter") else "none"
        count = case.tensor.numel()
        rows.append(Row(collective, actual_bytes, count, name, redop, memory, results, ratios))
    return rows


def header() -> Iterator[str]:
    yield (
        f"#{'size':>11}{'count':>11}{'type':>10}{'redop':>7}{'memory':>9}{'library':>12}"
        f"{'time':>11}{'algbw':>9}{'busbw':>9}{'#wrong':>8}{'ratio':>8}"
    )
    yield f"#{'(B)':>11}{'(elements)':>11}{'':38}{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}"


def lines(row: Row) -> Iterator[str]:
    kind = f"{row.bytes:>12}{row.count:>11}{row.type:>10}{row.redop:>7}{row.memory:>9}"
    for library, result in row.results.items():
        ratio = f"{row.ratios[library]:>8.2f}" if library in row.ratios else ""
        numbers = f"{result.time_us:>11.1f}{result.algbw:>9.2f}{result.busbw:>9.2f}"
        yield f"{kind}{library:>12}{numbers}{result.wrong:>8}{ratio}"


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)  # a rank has a core; gloo's sums would use more
    hvd.init()
    facts, rows = machine(), []
    for peer in args.peers:
        PEERS[peer].start()
    for collective in args.collective:
        log(title(collective, facts), *header())
        size_bytes = args.min_bytes
        while size_bytes <= args.max_bytes:
            for row in measure(args, collective, size_bytes):
                log(*lines(row))
                rows.append(row)
            size_bytes *= args.factor
    write_report(args.json, facts, rows)
    for peer in args.peers:
        PEERS[peer].stop()
    hvd.shutdown()
    return int(any(result.wrong for row in rows for result in row.results.values()))


if __name__ == "__main__":
    sys.exit(main())
