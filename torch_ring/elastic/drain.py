# SPDX-License-Identifier: Apache-2.0
"""Drain: a rank of an elastic job that gets SIGTERM leaves at a step where all ranks agree."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from types import FrameType, TracebackType

from torch_ring.elastic.job import ENDED_BY_SIGTERM, ElasticJob
from torch_ring.world.forked_signals import give_back, handle

__all__ = ["Drain"]

_log = logging.getLogger("torch_ring")

_ASK_AGAIN_S = 1.0  # rank 0 may have died meanwhile, or the ranks may have changed


class Drain:
    """Context of an elastic function, in which SIGTERM makes this process ask to leave the job.

    Does nothing if the program, or `torch_ring.world.preemption.watch`, handles SIGTERM, or outside
    the main thread, where Python lets no handler be set. If the function ends before the process
    has left, the signal then has its usual effect. In a process that waits to be let in, and in
    forked children, it has its usual effect at once.

    Args:
        job: the job, which is asked repeatedly until this process has left.
        timeout_s: seconds after which a process that has reached no commit exits, as by the signal.
    """

    def __init__(self, job: ElasticJob, timeout_s: float) -> None:
        self._job, self._timeout_s = job, timeout_s
        self._got: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: SIGTERM; False: the end
        self._is_wanted = self._is_over = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._thread = threading.Thread(
                target=self._serve, name="torch_ring drain", daemon=True
            )
            self._thread.start()
            handle(signal.SIGTERM, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._got.put(False)  # do not join the thread: it may be waiting for a dead host
        self._is_over = True
        give_back(signal.SIGTERM, self._note)
        if self._is_wanted and kind is not SystemExit:
            if kind is not None:
                _log.error("the elastic function failed after SIGTERM", exc_info=True)
            signal.raise_signal(signal.SIGTERM)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._is_over or not self._job.is_member:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._is_wanted = True
        self._got.put(True)

    def _serve(self) -> None:
        if not self._got.get():
            return
        _log.warning(
            "process %d got SIGTERM: it leaves the job at its next commit() or "
            "check_host_updates()",
            os.getpid(),
        )
        gives_up_at = time.monotonic() + self._timeout_s
        while time.monotonic() < gives_up_at:
            self._job.ask_to_leave()
            try:
                if not self._got.get(timeout=_ASK_AGAIN_S):
                    return
            except queue.Empty:
                continue
        _log.error(
            "process %d has come to no commit() or check_host_updates() within %g s of SIGTERM "
            "(TORCH_RING_ELASTIC_TIMEOUT): it ends",
            os.getpid(),
            self._timeout_s,
        )
        os._exit(ENDED_BY_SIGTERM)
