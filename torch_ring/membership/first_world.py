# SPDX-License-Identifier: Apache-2.0
"""begin: makes the first world of an elastic job from the processes that are alive.

The launcher knows which processes live. It gives each of them a place when all have asked, so the
others do not wait for a process that dies before. If one dies later, that world is not made, and
the others ask once more. They keep their order, and are numbered anew.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ring.config import Config
from torch_ring.errors import (
    MismatchError,
    PeerLostError,
    RingError,
    TimeoutError,
    first_line,
)
from torch_ring.membership.directory import ask_for_place
from torch_ring.membership.member import key_of
from torch_ring.setup.failure import missing_ranks, progress
from torch_ring.setup.launchers import discover, process_name
from torch_ring.setup.network import Deadline, close_in_child, own_address
from torch_ring.setup.store_client import open_store

__all__ = ["begin", "begins_with_others"]

_log = logging.getLogger("torch_ring")

_UNPLACED = dict.fromkeys(("rank", "size", "local_rank", "local_size"))

# Time for making a world whose ranks were alive a moment ago.
_JOIN_S = 5.0
_JOIN_S_PER_RANK = 0.05

_PROGRESS_S = 5.0
_UNREACHABLE_S = 10.0  # for a launcher that does not answer
_BACKLOG = 4096

# Pauses between two questions: all ranks ask one launcher.
_FIRST_PAUSE_S = 0.002
_PAUSE_S = 0.03
_PAUSE_S_PER_RANK = 0.001

Join = Callable[..., None]
"""Makes a world from rank, size and so on, as for init(), and the store; see `join_world`."""


def begins_with_others(config: Config) -> bool:
    """Return whether the launcher has started this process as part of an elastic job."""
    return bool(config.directory and process_name()) and not config.is_newcomer


def begin(config: Config, join: Join) -> None:
    """Make the first world of the job with the other living processes.

    Args:
        config: the settings.
        join: makes a world; it is called again if that has failed.

    Raises:
        TimeoutError: processes did not ask for a place, or did not join, in time; names them.
        RingError: too few processes live; or no world was made although no process has died.
        InvalidArgumentError, MismatchError: raised by `join`.
    """
    before: Sequence[str] = ()
    failure: RingError | None = None
    has_whole_time = False
    while True:
        with _listen(config) as listener:
            question = _Question(config, listener)
            answer = _ask(question, config.init_timeout_s)
            if answer["kind"] == "void":
                continue
            if answer["kind"] == "begun":  # members have reported a world
                if failure is not None:
                    raise failure
                join(dict(_UNPLACED), None)
                return
            processes = answer["processes"]
            size = len(processes)
            if size < config.min_ranks:
                raise RingError(
                    f"{size} ranks are left, and TORCH_RING_MIN_RANKS is {config.min_ranks}: the "
                    "others have ended before there was a world"
                )
            if failure is not None and processes == before:
                if has_whole_time or not isinstance(failure, (TimeoutError, PeerLostError)):
                    raise failure  # another attempt would fail the same way
                has_whole_time = True
            timeout_s = config.init_timeout_s
            if not has_whole_time:
                timeout_s = min(timeout_s, _JOIN_S + _JOIN_S_PER_RANK * size)
            rank = processes.index(process_name())
            try:
                # Rank 0's store serves the others: it must live until all have joined.
                store = _store(answer["store"], rank, size, listener)
                place = _UNPLACED | {"rank": rank, "size": size}
                deadline = Deadline(timeout_s)
                join(place, store, deadline=deadline, missed=question.missed)
            except RingError as error:
                if isinstance(error, MismatchError):
                    raise
                before, failure = processes, error
                _log.debug("a world of %d ranks was not made: %s", size, first_line(error))
                continue
        if failure is not None and rank == 0 and size < len(before):
            _log.warning("%d ranks begin without the others: %s", size, first_line(failure))
        return


def _listen(config: Config) -> socket.socket:
    """Return a socket that listens at an address which the other hosts can reach."""
    host = own_address(config.interface, config.directory.rpartition(":")[0])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return close_in_child(socket.create_server((host, 0), family=family, backlog=_BACKLOG))


class _Question:
    """The question of this process for a place in one world. Blocks for seconds at most."""

    def __init__(self, config: Config, listener: socket.socket) -> None:
        self._directory, self._key = config.directory, key_of(config.secret, config.tls)
        self._asker = process_name(), secrets.token_hex(8), *listener.getsockname()[:2]

    def ask(self) -> dict[str, Any]:
        """Return the answer of `Gathering.ask`. Raises RingError: the launcher does not answer."""
        return ask_for_place(self._directory, self._key, *self._asker)

    def missed(self, _: Collection[int]) -> Collection[int]:
        """Return the ranks of this process's world that have exited."""
        with contextlib.suppress(RingError):  # without an answer the deadline ends the wait
            answer = self.ask()
            if answer["kind"] == "void":
                return list(answer["gone"])
        return ()


def _ask(question: _Question, timeout_s: float) -> dict[str, Any]:
    """Return the launcher's answer, after all living processes have asked."""
    rank, size = discover().rank, discover().size
    deadline, unreachable = Deadline(timeout_s), Deadline(_UNREACHABLE_S)
    began, next_line = time.monotonic(), Deadline(_PROGRESS_S)
    pause_s = _FIRST_PAUSE_S
    while True:
        here: Sequence[int] = ()
        missing: Sequence[int] = ()
        try:
            answer = question.ask()
        except RingError:
            if unreachable.passed() or deadline.passed():
                raise
        else:
            if answer["kind"] != "wait":
                return answer
            here, missing = answer["here"], answer["missing"]
            unreachable = Deadline(_UNREACHABLE_S)
        if deadline.passed():
            raise missing_ranks(set(range(size)).difference(missing), size, deadline)
        if next_line.passed() and missing:
            next_line = Deadline(_PROGRESS_S)
            if rank in here[:1]:
                waited_s = time.monotonic() - began
                _log.info(progress(here, len(here) + len(missing), waited_s, missing))
        time.sleep(min(pause_s, deadline.left_s()))
        pause_s = min(1.5 * pause_s, _PAUSE_S + _PAUSE_S_PER_RANK * size)


def _store(
    address: tuple[str, int], rank: int, size: int, listener: socket.socket
) -> TCPStore | None:
    """Return the store where the ranks meet; rank 0 serves it."""
    if size == 1:
        return None
    served = listener if rank == 0 else None
    store = open_store(address, "the store of the first world", served)
    store.set_timeout(timedelta(seconds=_JOIN_S))
    return store
