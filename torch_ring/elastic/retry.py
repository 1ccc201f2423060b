# SPDX-License-Identifier: Apache-2.0
"""run: training goes on after ranks have died."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any, Concatenate, TypeVar, cast

from torch_ring.elastic.drain import Drain
from torch_ring.elastic.job import ENDED_BY_SIGTERM, ElasticJob
from torch_ring.elastic.regroup import CallOverError, LeftOutError
from torch_ring.elastic.state import (
    ADDED,
    REMOVED,
    RanksUpdatedInterrupt,
    State,
    StateLostError,
)
from torch_ring.errors import (
    HostsUpdatedInterrupt,
    MismatchError,
    ProcessSetLostError,
    RingError,
)
from torch_ring.world import current

__all__ = ["run"]

_log = logging.getLogger("torch_ring")

ResultT = TypeVar("ResultT")
# A function of a state and of other things. A string: Python 3.10 takes no `...` here.
TrainT = TypeVar("TrainT", bound="Callable[Concatenate[Any, ...], Any]")

# Consecutive failures without a dead rank: after so many, another attempt would fail the same way.
_MOST_FRUITLESS = 3
_SOON_S = 60.0  # a failure later than this after the last one has another cause


def run(func: TrainT) -> TrainT:
    """Make a training function go on when ranks die. Horovod's ``hvd.elastic.run``.

    ``func(state, ...)`` continues the training from `state`. If a rank dies, the survivors make a
    new world, in the order of their old ranks, make their states the same (`State.resume`) and call
    `func` again. So `func` must begin at the place that the state holds::

        @hvd.elastic.run
        def train(state):
            while state.epoch < epochs:
                while state.batch < batches:
                    step(...)
                    state.batch += 1  # before check_host_updates(): else the step is done again
                    state.check_host_updates()
                state.epoch, state.batch = state.epoch + 1, 0

    The launcher must let survivors live: see docs/elastic.md.

    Args:
        func: takes a `State` first.

    Returns:
        A function of the same arguments. It calls `init`, gives the present state of rank 0 to all
        ranks, and returns the result of `func`; None in a process that has joined after the ranks
        had finished this function and called another. It raises the errors of `func` that are no
        RingError, and MismatchError and ProcessSetLostError. It raises a RingError if fewer than
        TORCH_RING_MIN_RANKS ranks live, or if the others go on without this rank.

        A rank that the launcher takes from the job leaves at the next ``commit()`` or
        ``check_host_updates()`` by ``SystemExit(0)``, and a rank that gets SIGTERM by
        ``SystemExit(143)``. If all ranks leave at once, all do so by ``SystemExit(143)``: the job
        is not done. A program that handles SIGTERM itself, or has called
        `torch_ring.world.preemption.watch`, decides itself.
    """

    @functools.wraps(func)
    def train(state: State, *args: Any, **kwargs: Any) -> Any:
        current.init()
        state.save()  # includes changes since the state was made, or since the last function
        on_change = functools.partial(_note_hosts, state)
        with (
            contextlib.closing(ElasticJob(on_change)) as job,
            Drain(job, current.config().elastic_timeout_s),
        ):
            return _train(job, functools.partial(func, state, *args, **kwargs), state)

    return cast("TrainT", train)


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback, which may hold references to the old world.

    A frame may also refer to the error: such a cycle would keep the world until the next garbage
    collection.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _note_hosts(state: State, have_come: bool) -> None:
    state.on_hosts_updated(time.time(), ADDED if have_come else REMOVED)


def _train(job: ElasticJob, func: Callable[[], ResultT], state: State) -> ResultT:
    prepare: Callable[[], None] | None = state.sync
    is_newcomer, resets, fruitless, failed_at = not job.members, False, 0, 0.0
    while True:
        cause: RingError | HostsUpdatedInterrupt
        try:
            if is_newcomer:
                is_newcomer, resets, prepare = False, True, state.resume
                state.on_arrival()
                job.regroup(None)
            if resets:
                state.reset()
            if prepare is not None:
                prepare()
            if resets:
                state.on_reset()
                if job.has_newcomers:  # on_reset() has dropped their messages
                    _note_hosts(state, True)
            return func()
        except CallOverError:
            _log.warning("the ranks are in a later elastic function: this process skips this one")
            return None  # type: ignore[return-value]  # like a function without a result
        except (MismatchError, LeftOutError, StateLostError, ProcessSetLostError):
            raise
        except RingError as error:
            cause, prepare = error, state.resume
        except HostsUpdatedInterrupt as interrupt:
            cause, prepare = interrupt, state.resume
        leavers: Collection[int] = ()
        try:
            if isinstance(cause, RanksUpdatedInterrupt):
                leavers = job.leavers()
        except MismatchError:
            raise
        except RingError as error:  # a rank has died meanwhile
            cause = error
        if leavers and current.rank() in leavers:
            is_last = len(leavers) == current.size()
            _log.warning("%s at this step", "all ranks leave" if is_last else "this rank leaves")
            sys.exit(ENDED_BY_SIGTERM if is_last or job.is_signalled else 0)
        before = job.members
        _forget_frames(cause)
        job.regroup(cause, leavers)
        resets = True
        is_fruitless = isinstance(cause, RingError) and job.members == before
        is_soon = time.monotonic() - failed_at < _SOON_S
        failed_at = time.monotonic()
        fruitless = (fruitless if is_soon else 0) + 1 if is_fruitless else 0
        if fruitless == _MOST_FRUITLESS:
            raise cause
