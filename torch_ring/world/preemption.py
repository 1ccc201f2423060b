# SPDX-License-Identifier: Apache-2.0
"""watch, requested: a stop on which all ranks agree, at the same step.

A scheduler that is about to end a job sends a signal: to one process, to those of a host or to all,
at different moments. The control planes pass it on to all ranks, even while their programs are
busy, and agree on a call of `requested` that no rank has made yet. A step needs no message: until a
signal comes, a call only checks a flag.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from types import FrameType

from torch_ring._C import ControlPlane
from torch_ring.errors import InvalidArgumentError, TimeoutError
from torch_ring.native import is_for_one_rank
from torch_ring.setup.network import Deadline, at_fork, pauses
from torch_ring.world import current
from torch_ring.world.forked_signals import give_back, handle
from torch_ring.world.join import World

__all__ = ["reason", "requested", "shield_worker", "watch"]

_log = logging.getLogger("torch_ring")

_SIGNALS = ("SIGTERM", "SIGUSR1") if hasattr(signal, "SIGUSR1") else ("SIGTERM",)

_watched: Sequence[signal.Signals] = ()  # also in a forked worker
_got = ""  # the first signal that this process got
_has_said = False  # the stop has been logged


def watch(signals: Iterable[str | int] = _SIGNALS) -> None:
    """Treat these signals as a request that all ranks stop; see `requested`.

    Call it on all ranks, in the main thread, before or after ``init()``. The signals no longer end
    this process: the program must stop when `requested` returns True, within the scheduler's time.
    A forked process gets the previous handlers; workers of a DataLoader need `shield_worker`.

    Args:
        signals: names or numbers, as in `signal.Signals`. They replace those of an earlier call. An
            empty list restores the previous handlers, and a signal that has come does not count in
            later worlds.

    Raises:
        InvalidArgumentError: there is no such signal, it cannot be caught, or this is not the main
            thread, where Python handles signals.
    """
    _install([_number(each) for each in signals])


def requested() -> bool:
    """Return whether all ranks must stop here, because one of them got a signal.

    The ranks must call it equally often, at the same places of their programs, for example once a
    step. If ranks have different numbers of steps (`join`), call it between the epochs. The answer
    is the same on all ranks for the same call, and stays True::

        hvd.preemption.watch()
        for batch in batches:
            step(batch)
            if hvd.preemption.requested():
                save()
                hvd.barrier()  # a rank that exits earlier may have the launcher end the others
                sys.exit(143)  # as if SIGTERM had ended it: schedulers start the job again

    After a signal a call waits until the other ranks' control planes have answered. That takes some
    milliseconds, even if their programs are busy.

    Returns:
        Whether to stop.

    Raises:
        NotInitializedError: there is no world.
        PeerLostError: a rank was lost while they agreed.
        TimeoutError: a rank did not answer within TORCH_RING_INIT_TIMEOUT.
    """
    global _has_said
    current.require_own()
    world = current.world()
    stops = bool(_got) if world.plane is None else _passed(world, world.plane)
    if stops and not _has_said and world.rank == 0:
        _has_said = True
        _log.warning("all ranks stop at this step: %s", reason())
    return stops


def reason() -> str:
    """Return the first rank that got a signal, and the signal, as far as this rank knows.

    Returns:
        For example "rank 2 (pid 7 on host a) got SIGTERM"; an empty text if no rank got a signal.
    """
    world = current.find_world()
    if world is not None and world.plane is not None:
        return world.plane.why_stop()
    return f"rank 0 (pid {os.getpid()}) got {_got}" if _got else ""


def shield_worker(_worker: int = 0) -> None:
    """Make this process, a worker of a DataLoader, ignore the watched signals.

    Launchers and schedulers send a signal to all processes of a rank. If it ended a worker, that
    would be an error in the rank, just when it saves its state. Pass this function as the loader's
    `worker_init_fn`, or call it there, before the worker starts threads. The rank itself can still
    end the worker by SIGTERM, as a DataLoader does. A worker that is not forked from the rank
    ignores SIGTERM and SIGUSR1.

    Args:
        _worker: the number of the worker, as a `worker_init_fn` gets it; not used.
    """
    if is_for_one_rank():  # no launcher sends signals
        return
    numbers = _watched or [_number(each) for each in _SIGNALS]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    drop = threading.Thread(target=_drop, args=(numbers, os.getppid()), daemon=True)
    drop.start()


def _drop(numbers: Iterable[signal.Signals], rank: int) -> None:
    """Drop signals, but end this process at a SIGTERM of the rank."""
    while True:
        info = signal.sigwaitinfo(numbers)
        if (info.si_signo, info.si_pid) == (signal.SIGTERM, rank):
            os._exit(0)  # as torch's own handler in a worker


def _passed(world: World, plane: ControlPlane) -> bool:
    stops = plane.pass_point()
    if stops is not None:
        return stops
    deadline = Deadline(world.config.init_timeout_s)
    for _ in pauses(deadline, world.size):
        stops = plane.pass_point()
        if stops is not None:
            return stops
    raise TimeoutError(f"the ranks have not agreed {deadline} where to stop: {reason()}")


def _number(name: str | int) -> signal.Signals:
    try:
        number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError):
        raise InvalidArgumentError(
            f"there is no signal {name!r}: give names as in ('SIGTERM', 'SIGUSR1')"
        ) from None
    if number.name in ("SIGKILL", "SIGSTOP"):
        raise InvalidArgumentError(f"a process cannot handle {number.name}")
    return number


def _install(numbers: Iterable[signal.Signals]) -> None:
    global _got, _has_said, _watched
    new = tuple(numbers)
    try:
        for number in new:
            handle(number, _note)
        for number in set(_watched).difference(new):
            give_back(number, _note)
    except ValueError:
        raise InvalidArgumentError(
            "signals are handled by the main thread: call watch() there"
        ) from None
    if not new:
        _got, _has_said = "", False
    _watched = new


def _note(number: int, _frame: FrameType | None) -> None:
    global _got
    _got = _got or signal.Signals(number).name
    _tell()


def _tell() -> None:
    """Report a signal to the other ranks; it may have come before the world was made."""
    world = current.find_world()
    if _got and world is not None and world.plane is not None:
        world.plane.want_stop(_got)


def _forget_in_child() -> None:
    global _got
    _got = ""


current.after_join(_tell)
at_fork(after_in_child=_forget_in_child)
