# SPDX-License-Identifier: Apache-2.0
"""run_ranks: checks allreduce on local ranks, and times it beside gloo's. run_launched: on a job's.

The module is also the program of a rank: it prints its result as a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import statistics
import subprocess
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
from torch_ring.collectives.reduce_op import Max, Sum
from torch_ring.errors import first_line
from torch_ring.setup.launchers import without_launchers
from torch_ring.setup.network import own_loopback
from torch_ring.world import current

__all__ = ["run_launched", "run_ranks"]

_GRACE_S = 5.0  # for the other ranks, when one has failed: they may know more
_POLL_S = 0.02

Facts = dict[str, Any]


def run_ranks(size: int, transport: str, deadline_s: float, device: str = "cpu") -> Facts:
    """Run this module on `size` new processes; none is left when this returns.

    Args:
        size: the number of ranks.
        transport: their TORCH_RING_TRANSPORT; "ucx": they have TORCH_RING_NETWORK=ucx, and share no
            memory.
        deadline_s: seconds after which all ranks are ended.
        device: "cpu", or "cuda": a GPU for each rank.

    Returns:
        The result of rank 0, and the ranks' log. "failure" is None, or a line with the reason why
        there is no result.
    """
    facts: Facts = {"asked_transport": transport, "ranks": size, "failure": None}
    facts |= {"transport": None, "gloo_problem": None, "allreduce": []}
    try:
        store = TCPStore(own_loopback(), 0, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError):  # the ranks report that there is no gloo
        store = None
    arguments = [size, math.ceil(deadline_s) + 1, os.getpid(), store.port if store else 0, device]
    environment = _environment(transport, deadline_s)
    ranks: list[_Rank] = []
    codes: list[int | None] = []
    try:
        for number in range(size):
            ranks.append(_Rank([number, *arguments], environment))
        codes = _wait(ranks, deadline_s)
    except OSError as error:
        facts["failure"] = f"rank {len(ranks)} cannot be started: {error}"
    finally:
        for rank in ranks:
            rank.end()
    failures = [f"rank {i}: {ranks[i].failure(code)}" for i, code in enumerate(codes) if code]
    # The other ranks' PeerLostErrors say less than the failed rank's own error.
    failures.sort(key=lambda failure: "PeerLostError" in failure)
    running = ", ".join(f"rank {i}" for i, code in enumerate(codes) if code is None)
    if failures:
        facts["failure"] = failures[0]
    elif running:
        facts["failure"] = f"{running} did not end within {deadline_s:g} s"
    elif codes:
        facts |= ranks[0].said()
    log = [line for rank in ranks for line in rank.lines if line.startswith("[torch_ring]")]
    return facts | {"log": list(dict.fromkeys(log))}


class _Rank:
    """The process of one rank, and the lines that it has written."""

    def __init__(self, arguments: list[Any], environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._output = os.memfd_create("output of a rank")
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch_ring.self_test.rank", *map(str, arguments)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # Ctrl-C is for the self-test alone, which ends its ranks
            )
        except OSError:
            os.close(self._output)
            raise

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        with open(self._output, "rb") as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
        self.lines = [line for line in lines if line]

    def said(self) -> Facts:
        """Return the result that the rank has printed."""
        results = [line for line in self.lines if line.startswith('{"')]
        return dict(json.loads(results[-1])) if results else {}

    def failure(self, code: int) -> str:
        """Return the reason of a rank's exit code other than 0, in one line."""
        if said := self.said().get("failure"):
            return str(said)
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return next(reversed(self.lines), f"ended with exit code {code}")


def _environment(transport: str, deadline_s: float) -> dict[str, str]:
    waiting_s = f"{max(0.1, 0.7 * deadline_s):g}"  # less: the ranks' errors say more
    over_ucx = transport == "ucx"
    return without_launchers() | {
        "TORCH_RING_TRANSPORT": "tcp" if over_ucx else transport,
        "TORCH_RING_NETWORK": "ucx" if over_ucx else "tcp",
        "TORCH_RING_INIT_TIMEOUT": waiting_s,
        "TORCH_RING_TIMEOUT": waiting_s,
        "TORCH_RING_LOG_LEVEL": "info",
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this host
        "OMP_NUM_THREADS": "1",
    }


def _wait(ranks: list[_Rank], deadline_s: float) -> list[int | None]:
    """Return the exit codes of the ranks; None: still running at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if None not in codes or time.monotonic() > end:
            return codes
        if any(codes):
            end = min(end, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)


# --- the program of a rank

_TIMED_BYTES = (1 << 10, 1 << 20)
_ROUNDS = 9  # for each library; the median counts
_ROUND_S = 0.02  # approximate duration of a library's calls in one round
_MOST_CALLS = 200  # in a round
_UNTIMED = 3  # calls: they fill the caches, and the other library's threads fall asleep

Call = Callable[[Tensor], object]


def main() -> None:
    """Run as rank `argv[1]` of `argv[2]`; print {"failure": ...} instead of raising."""
    rank, size, deadline_s, starter, port = map(int, sys.argv[1:6])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end when the self-test does
    if os.getppid() != starter:
        sys.exit("the self-test has ended")
    signal.alarm(deadline_s)
    torch.set_num_threads(1)  # as many as a rank should have on a full machine
    try:
        result = _test(rank, size, sys.argv[6], deadline_s, port)
    except Exception as error:
        print(json.dumps({"failure": f"{type(error).__name__}: {first_line(error)}"}), flush=True)
        sys.exit(1)
    print(json.dumps(result), flush=True)


def _test(rank: int, size: int, device: str, deadline_s: int, port: int) -> Facts:
    if device == "cuda":
        torch.cuda.set_device(rank)
    world.init(rank=rank, size=size, local_rank=rank, local_size=size)
    transport = "shm" if current.engine().has_shared_memory() else current.config().network
    _check_sums(device)
    calls: dict[str, Call] = {"torch_ring": _allreduce}
    problem = None
    if device == "cpu":
        problem = _start_gloo(port, deadline_s)
        if problem is None:
            calls["gloo"] = dist.all_reduce
    rows = _rows(calls, device)
    if "gloo" in calls:
        dist.destroy_process_group()
    world.shutdown()
    used = "nccl" if device == "cuda" else transport
    return {"transport": used, "gloo_problem": problem, "allreduce": rows}


def run_launched() -> Facts:
    """Run as one of a launcher's ranks, on all hosts: check allreduce, and time it.

    Returns:
        As run_ranks, without gloo's times: gloo would need a store.

    Raises:
        RingError: the ranks do not find one another, or lose one another.
        RuntimeError: a sum is wrong.
    """
    world.init()
    _check_sums("cpu")
    result: Facts = {"asked_transport": "launched", "ranks": world.size(), "failure": None}
    result |= {"transport": current.world().summary, "gloo_problem": None}
    result["allreduce"] = _rows({"torch_ring": _allreduce}, "cpu")
    world.shutdown()
    return result | {"log": []}


def _allreduce(tensor: Tensor) -> Tensor:
    return allreduce_(tensor, op=Sum)


def _check_sums(device: str) -> None:
    for count in (1, 1000, 1 << 20):
        _check(count, device)


def _rows(calls: dict[str, Call], device: str) -> list[Facts]:
    return [{"bytes": count, **_times(calls, count, device)} for count in _TIMED_BYTES]


def _check(count: int, device: str) -> None:
    """Raise RuntimeError unless an allreduce of `count` elements has the right sum."""
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


def _start_gloo(port: int, deadline_s: int) -> str | None:
    """Connect gloo's ranks over the self-test's store; return, on all, why there is no gloo."""
    size, rank, timeout, problem = world.size(), world.rank(), timedelta(seconds=deadline_s), ""
    if not (dist.is_available() and dist.is_gloo_available()):
        return "torch has no gloo"
    try:
        store = TCPStore(own_loopback(), port, size, False, timeout)
        dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=size)
    except (RuntimeError, OSError, ValueError) as error:
        problem = first_line(error)
    failed = allreduce(torch.tensor(float(bool(problem)), device="cpu"), op=Max)
    return (problem or "another rank has none") if failed else None


def _times(calls: dict[str, Call], count: int, device: str) -> dict[str, float]:
    """Return each library's microseconds: the medians of alternating rounds."""
    tensors = {name: torch.zeros(count // 4, device=device) for name in calls}
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        once = _seconds(call, tensors[name], _UNTIMED)
        repeats[name] = min(_MOST_CALLS, max(1, math.ceil(_ROUND_S / once)))
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_ROUNDS):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            rounds[name].append(_seconds(calls[name], tensors[name], repeats[name]))
    return {f"{name}_us": statistics.median(seconds) * 1e6 for name, seconds in rounds.items()}


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
