"""The program of one rank of the self-test: checks allreduce, and times it beside gloo's.

Started by `torch_ring.self_test.rank`. Prints its result as a line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
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
from torch_ring.setup.launchers import without_launchers
from torch_ring.world import current

__all__ = ["run_ranks"]

_GRACE_S = 5.0  # for the other ranks, when one has failed: they may know more of it
_POLL_S = 0.02

Facts = dict[str, Any]


def run_ranks(size: int, transport: str, deadline_s: float, device: str = "cpu") -> Facts:
    """Run `torch_ring.self_test.rank` on `size` new processes; none is left when this returns.

    Args:
        size: the number of ranks.
        transport: their TORCH_RING_TRANSPORT.
        deadline_s: seconds after which all of them are ended.
        device: "cpu", or "cuda": a GPU for each rank.

    Returns:
        The result of rank 0, and the ranks' log. "failure" is None, or says in one line why there
        is no result.
    """
    facts: Facts = {"asked_transport": transport, "ranks": size, "failure": None}
    facts |= {"transport": None, "gloo_problem": None, "allreduce": []}
    with tempfile.TemporaryDirectory(prefix="torch_ring-") as folder:
        ranks: list[_Rank] = []
        try:
            for number in range(size):
                ranks.append(_Rank(number, size, transport, deadline_s, device, Path(folder)))
            facts["failure"] = _wait(ranks, deadline_s)
        except OSError as error:
            facts["failure"] = f"rank {len(ranks)} cannot be started: {error}"
        finally:
            for rank in ranks:
                rank.end()
        if facts["failure"] is None:
            facts |= ranks[0].said()
        log = [line for rank in ranks for line in rank.log() if line.startswith("[torch_ring]")]
        return facts | {"log": list(dict.fromkeys(log))}


class _Rank:
    """The process of one rank, and the files that it writes to."""

    def __init__(
        self, rank: int, size: int, transport: str, deadline_s: float, device: str, folder: Path
    ) -> None:
        self.name = f"rank {rank}"
        self._output, self._log = folder / f"{rank}.out", folder / f"{rank}.err"
        arguments = [rank, size, math.ceil(deadline_s) + 1, os.getpid(), device]
        with self._output.open("wb") as output, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch_ring.self_test.rank", *map(str, arguments)],
                env=_environment(transport, deadline_s),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the self-test alone, which ends its ranks
            )

    def code(self) -> int | None:
        """Return the exit code; None: it runs."""
        return self._process.poll()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def said(self) -> Facts:
        """Return the result that the rank has printed."""
        lines = self._output.read_text(errors="replace").splitlines()
        try:
            result: Facts = json.loads(lines[-1])
        except (IndexError, ValueError):
            return {}
        return result

    def failure(self) -> str:
        """Return why a rank whose code is not 0 has failed, in one line."""
        code = self.code() or 0
        said = self.said().get("failure")
        if said:
            return str(said)
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return next(reversed(self.log()), f"ended with exit code {code}")

    def log(self) -> list[str]:
        return [line for line in self._log.read_text(errors="replace").splitlines() if line]


def _environment(transport: str, deadline_s: float) -> dict[str, str]:
    waiting_s = f"{max(0.1, 0.7 * deadline_s):g}"  # less: the ranks' errors say more than their end
    return without_launchers() | {
        "TORCH_RING_TRANSPORT": transport,
        "TORCH_RING_INIT_TIMEOUT": waiting_s,
        "TORCH_RING_TIMEOUT": waiting_s,
        "TORCH_RING_LOG_LEVEL": "info",
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this host
        "OMP_NUM_THREADS": "1",
    }


def _wait(ranks: list[_Rank], deadline_s: float) -> str | None:
    """Wait for the ranks; return why they have failed, in one line, or None."""
    end = time.monotonic() + deadline_s
    while (codes := [rank.code() for rank in ranks]).count(None) and time.monotonic() < end:
        if any(codes):
            end = min(end, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
    failed = [rank for rank in ranks if rank.code()]
    # The ranks that are left say that they have lost one, which says less than its own error.
    failed.sort(key=lambda rank: rank.failure().startswith("PeerLostError"))
    if failed:
        return f"{failed[0].name}: {failed[0].failure()}"
    running = [rank.name for rank in ranks if rank.code() is None]
    return f"{', '.join(running)} did not end within {deadline_s:g} s" if running else None


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
