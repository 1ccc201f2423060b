"""run_ranks: starts ranks on this machine, waits for them until a deadline, and ends them all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch_ring.rendezvous.launchers import without_launchers

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
