# SPDX-License-Identifier: Apache-2.0
"""The engine of a world or of a process set: make_engine, and exchanges among its ranks."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from torch_ring._C import Engine, Work
from torch_ring.config import Config, nccl_is_blocking
from torch_ring.errors import TimeoutError
from torch_ring.setup.connect import Connections
from torch_ring.setup.network import Deadline, pauses
from torch_ring.setup.topology import hosts_among, may_spin

__all__ = ["EngineExchange", "interrupt_deferred", "make_engine", "wait_for_all"]

_log = logging.getLogger("torch_ring")

_AVERAGE = 0  # ReduceOp::kAverage
_NOT_INLINE = 16 << 10  # elements: 64 KiB, too large to travel with the agreement


def make_engine(
    connections: Connections,
    number: int,
    ranks: Sequence[int],
    slots: Sequence[int],
    config: Config,
) -> Engine:
    """Return a running engine for some ranks of the world. Does not wait for the others.

    Args:
        connections: this process's connections.
        number: the set's number, the same on all ranks, and never reused; 0: the world.
        ranks: the members.
        slots: for each member, the offset of the set's memory in the member's own, or -1.
        config: the settings.
    """
    rank = ranks.index(connections.rank)
    alone = len(ranks) == 1
    peers = [connections.peers[member] for member in ranks] if not alone else []
    engine = Engine(
        rank,
        list(ranks),
        hosts_among(ranks, connections.host_of),
        [connections.labels[member] for member in ranks],
        alone or may_spin(rank, peers),
        None if alone else connections.plane,
        number,
        None if alone else connections.memory,
        list(slots),
        connections.launch_order,
        config,
        ucx_library=connections.ucx_library,
        nccl_blocking=nccl_is_blocking(),
        log=_log.warning,
    )
    connections.add_engine(engine)
    return engine


def wait_for_all(
    engine: Engine, deadline: Deadline, size: int, *, over_network: bool = False
) -> None:
    """Wait until the engines of all ranks run.

    Args:
        engine: the world's engine.
        deadline: the deadline of init().
        size: the number of ranks.
        over_network: whether to send data, too, which over UCX can fail; a barrier sends none.

    Raises:
        TimeoutError: an engine has not answered before the deadline.
        PeerLostError: a rank has died, or cannot be reached.
    """
    if over_network:
        data = torch.zeros(_NOT_INLINE, dtype=torch.float32, device="cpu")
        work = engine.submit("allreduce", data, data, "torch_ring.init", False, _AVERAGE)
    else:
        work = engine.submit("barrier", None, None, "torch_ring.init")
    for _ in pauses(deadline, size):
        if work.done():
            work.wait()
            return
    raise TimeoutError(f"not all engines have answered {deadline}")


_DEFERRED = [  # Windows has fewer
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM")
    if hasattr(signal, name)
]


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Context that defers the program's signal handlers to its end.

    A handler may raise, as that of Ctrl-C does: without this, the other ranks would wait in vain
    for the rest of the block. A second signal of the same kind is not deferred. The context does
    nothing outside the main thread, where Python handles signals, and without Python handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    given = {number: signal.getsignal(number) for number in _DEFERRED} if is_main else {}
    handlers = {number: handler for number, handler in given.items() if callable(handler)}
    came: dict[int, list[FrameType | None]] = {number: [] for number in handlers}
    is_open = True

    def defer(number: int, frame: FrameType | None) -> None:
        if is_open:
            came[number].append(frame)
        if not is_open or len(came[number]) > 1:
            handlers[signal.Signals(number)](number, frame)

    try:
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        # A restored handler may raise before the next one is restored; that one must not defer.
        is_open = False
        with contextlib.ExitStack() as calls:  # call each handler, even if one raises
            for which, frames in came.items():
                if len(frames) == 1:
                    calls.callback(handlers[signal.Signals(which)], which, frames[0])
            for number, handler in handlers.items():
                signal.signal(number, handler)


_NAME = "torch_ring.process_sets"


class EngineExchange:
    """One rank's side of exchanges among all ranks of a world.

    All ranks call the same methods in the same order. An interrupt (Ctrl-C) is deferred to the end
    of this context, so that it does not put the ranks out of step.

    Args:
        engine: the world's engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._deferral = interrupt_deferred()

    def __enter__(self) -> EngineExchange:
        self._deferral.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._deferral.__exit__(*failure)

    def numbers(self, *values: int) -> list[list[int]]:
        """Return the numbers of all ranks, by rank: 64-bit numbers, equally many on each.

        Raises:
            MismatchError: the other ranks call another operation; the job may go on.
            PeerLostError, TimeoutError: raised by the world's engine.
        """
        own = torch.tensor([values], dtype=torch.int64, device="cpu")
        gathered = _result(self._engine.submit("allgather", own, None, f"{_NAME}.numbers"))
        numbers: list[list[int]] = gathered.tolist()
        return numbers

    def texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank. Raises the errors of `numbers`."""
        own = text.encode()
        sizes = [size for (size,) in self.numbers(len(own))]
        payload = torch.frombuffer(bytearray(own or b"\0"), dtype=torch.uint8)[: len(own)]
        gathered = _result(self._engine.submit("allgather", payload, None, f"{_NAME}.texts"))
        parts = torch.split(gathered, sizes)
        return [bytes(part.numpy()).decode() for part in parts]


def _result(work: Work) -> torch.Tensor:
    result: torch.Tensor = work.wait()
    return result
