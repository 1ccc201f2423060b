"""The program of one rank of the self-test: checks allreduce, and times it beside gloo's.

Started by `torch_ring.self_test.local_ranks`. Prints its result as a line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ring import world
from torch_ring.collectives.allreduce import allreduce, allreduce_
from torch_ring.collectives.barrier import barrier
from torch_ring.collectives.objects import broadcast_object
from torch_ring.collectives.reduce_op import Max, Sum
from torch_ring.errors import first_line
from torch_ring.world import current

_TIMED_BYTES = (1 << 10, 1 << 20)
_ROUNDS = 9  # of each library; their median counts
_ROUND_S = 0.02  # about what a library's calls of one round take
_MOST_CALLS = 200  # in a round
_UNTIMED = 3  # calls: they fill the caches, and the other library's threads fall asleep

Call = Callable[[Tensor], object]


def main() -> None:
    """Run as rank `argv[1]` of `argv[2]`; print {"failure": ...} instead of raising."""
    rank, size, deadline_s, starter = map(int, sys.argv[1:5])
    _end_with(starter, deadline_s)
    torch.set_num_threads(1)  # as many as a rank should have on a full machine
    try:
        result = _test(rank, size, sys.argv[5], deadline_s)
    except Exception as error:
        print(json.dumps({"failure": f"{type(error).__name__}: {first_line(error)}"}), flush=True)
        sys.exit(1)
    print(json.dumps(result), flush=True)


def _end_with(starter: int, deadline_s: int) -> None:
    """End when the process that started this one does, and at the deadline at the latest."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != starter:
        sys.exit("the self-test has ended")
    signal.alarm(deadline_s)


def _test(rank: int, size: int, device: str, deadline_s: int) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.set_device(rank)
    world.init(rank=rank, size=size, local_rank=rank, local_size=size)
    shares = current.engine().has_shared_memory()
    for count in (1, 1000, 1 << 20):
        _check(count, device)
    calls: dict[str, Call] = {"torch_ring": lambda tensor: allreduce_(tensor, op=Sum)}
    problem = None
    if device == "cpu":
        problem = _start_gloo(deadline_s)
        if problem is None:
            calls["gloo"] = dist.all_reduce
    rows = [{"bytes": count, **_times(calls, count, device)} for count in _TIMED_BYTES]
    if "gloo" in calls:
        dist.destroy_process_group()
    world.shutdown()
    transport = "nccl" if device == "cuda" else "shm" if shares else "tcp"
    return {"transport": transport, "gloo_problem": problem, "allreduce": rows}


def _check(count: int, device: str) -> None:
    """Raise RuntimeError unless an allreduce of `count` elements has the sum of all ranks'."""
    size = world.size()
    index = torch.arange(count, device=device, dtype=torch.float32) % 1000  # exact in float32
    total = allreduce(index * size + world.rank(), op=Sum)
    wrong = torch.nonzero(total != index * size * size + size * (size - 1) / 2)
    if len(wrong):
        first = int(wrong[0])
        raise RuntimeError(
            f"the allreduce of {count} elements is wrong in {len(wrong)} of them, the first is "
            f"element {first}: {total[first].item()}"
        )


def _start_gloo(deadline_s: int) -> str | None:
    """Connect gloo's ranks through torch_ring's; return why there is no gloo, on all ranks."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return "torch has no gloo"
    size, rank, timeout = world.size(), world.rank(), timedelta(seconds=deadline_s)
    store, problem = None, ""
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            store = TCPStore("127.0.0.1", 0, size, True, timeout, wait_for_workers=False)
    port = broadcast_object(store.port if store else None)
    if port is None:
        return "rank 0 cannot serve gloo's store"
    try:
        store = store or TCPStore("127.0.0.1", port, size, False, timeout)
        dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=size)
    except (RuntimeError, OSError) as error:
        problem = first_line(error)
    failed = allreduce(torch.tensor(float(bool(problem)), device="cpu"), op=Max)
    return (problem or "another rank has none") if failed else None


# --- times


def _times(calls: dict[str, Call], count: int, device: str) -> dict[str, Any]:
    """Return microseconds and GB/s of each library: medians of rounds in turns."""
    tensors = {name: torch.zeros(count // 4, device=device) for name in calls}
    repeats = {
        name: _repeats(_seconds(call, tensors[name], _UNTIMED)) for name, call in calls.items()
    }
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_ROUNDS):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            rounds[name].append(_seconds(calls[name], tensors[name], repeats[name]))
    medians = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    result: dict[str, Any] = {}
    for name, seconds in medians.items():
        result[f"{name}_us"] = seconds * 1e6
        result[f"{name}_gb_s"] = count / seconds / 1e9
    if "gloo" in medians:
        result["gloo_over_torch_ring"] = medians["gloo"] / medians["torch_ring"]
    return result


def _repeats(seconds: float) -> int:
    return min(_MOST_CALLS, max(1, math.ceil(_ROUND_S / seconds)))


def _seconds(call: Call, tensor: Tensor, repeats: int) -> float:
    """Return the time of one call on the slowest rank; the same on all ranks."""
    for _ in range(_UNTIMED):
        call(tensor)
    _synchronize(tensor)
    barrier()
    begun = time.perf_counter()
    for _ in range(repeats):
        call(tensor)
    _synchronize(tensor)
    own = (time.perf_counter() - begun) / repeats
    return allreduce(torch.tensor(own, dtype=torch.float64, device="cpu"), op=Max).item()


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
