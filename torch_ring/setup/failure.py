# SPDX-License-Identifier: Apache-2.0
"""Failure: the error that ends an init(), in the form that is sent to all ranks."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch_ring import errors
from torch_ring._C import limit_to_raise
from torch_ring.errors import MismatchError, PeerLostError, RingError, TimeoutError
from torch_ring.setup.network import Deadline

__all__ = [
    "Failure",
    "exited",
    "gone",
    "lacking",
    "missing_ranks",
    "name_ranks",
    "other_size",
    "other_version",
    "progress",
    "twice",
    "two_of_a_rank",
]

_KINDS = ("MismatchError", "PeerLostError", "TimeoutError")  # any other becomes a RingError
_NAMED = 16  # ranks named of a long list
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # EAGAIN: a lack of threads


@dataclass(frozen=True)
class Failure:
    """The type and the text of the error that ends an init() on all ranks."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Return the failure by which the other ranks learn of an error on `rank`."""
        reason = (str(error) or type(error).__name__).removeprefix(f"rank {rank}: ")
        return cls(type(error).__name__, f"init failed on rank {rank}: {reason}")

    @classmethod
    def of_all(cls, error: RingError) -> Failure:
        """Return the failure for an error that concerns all ranks alike."""
        return cls(type(error).__name__, str(error))

    def error(self) -> RingError:
        """Return the error to raise on a notified rank."""
        kind: type[RingError] = getattr(errors, self.kind) if self.kind in _KINDS else RingError
        return kind(self.text)

    def to_bytes(self) -> bytes:
        """Return the bytes to send."""
        return json.dumps([self.kind, self.text[:16384]]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Failure:
        """Return a failure that was sent. Damaged data become a failure, never an exception."""
        try:
            kind, text = json.loads(data)
        except (ValueError, TypeError, RecursionError):
            return cls("RingError", "init failed on another rank, for a reason that got lost")
        # Without a secret a stranger may have sent it: keep control characters off the terminal.
        return cls(
            str(kind), "".join(c if c.isprintable() or c == "\n" else "?" for c in str(text))
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"; a long list is cut."""
    some = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{more}"


def missing_ranks(
    here: Collection[int], size: int, deadline: Deadline, advice: str = ""
) -> TimeoutError:
    """Return the error of ranks that are not among `here` at the deadline.

    Args:
        here: the ranks that have arrived.
        size: the number of ranks.
        deadline: the deadline that has passed.
        advice: a sentence about the way in which these ranks find one another.
    """
    missing = sorted(set(range(size)).difference(here))
    if not missing:
        return TimeoutError(f"all {size} ranks have come, but the last of them not {deadline}")
    return TimeoutError(
        f"{name_ranks(missing)} of {size} did not arrive {deadline}: have these processes started, "
        f"and do they call {deadline.call}?{advice and ' '}{advice}"
    )


def exited(ranks: Sequence[int], size: int) -> PeerLostError:
    """Return the error of ranks that have exited: the others wait for them no longer."""
    return PeerLostError(f"{name_ranks(ranks)} of {size} exited during init")


def progress(
    here: Sequence[int],
    size: int,
    waited_s: float,
    missing: Sequence[int] | None = None,
    *,
    call: str = "init()",
) -> str:
    """Return the line of progress: the ranks `here`, and the missing ones (None: all others)."""
    if missing is None:
        missing = sorted(set(range(size)).difference(here))
    return (
        f"{call} has waited {waited_s:.0f} s: {len(set(here))} of {size} are here"
        f" ({name_ranks(sorted(here))}), {len(missing)} missing"
        + (f" ({name_ranks(missing)})" if missing else "")
    )


def two_of_a_rank(rank: int, size: int) -> RingError:
    """Return the error of two processes with the same rank."""
    return RingError(twice(f"two processes are rank {rank} of {size}"))


def twice(found: str) -> str:
    """Return the text for two processes with one rank, with other possible causes."""
    return (
        f"{found}, or another job has the same MASTER_ADDR and MASTER_PORT, or one process was "
        "killed in the middle of its start and another one started in its place"
    )


def other_version(who: str, error: Exception) -> RingError:
    """Return the error of an unreadable message from `who`, a rank or a host."""
    return RingError(f"{who} runs another version of torch_ring: {error}")


def gone(who: str, error: Exception | None = None) -> PeerLostError:
    """Return the error of a rank, named `who`, whose connection has been closed."""
    return PeerLostError(f"{who} has exited during init{'' if error is None else f': {error}'}")


def other_size(rank: int, size: int, others: Any) -> MismatchError:
    """Return the error of a rank whose number of ranks differs from the others'."""
    return MismatchError(
        f"rank {rank} is one of {size}, but another rank is one of {others}: give all ranks the "
        "same size"
    )


def lacking(error: BaseException, rank: int) -> RingError | None:
    """Return the error that names the limit to raise on `rank`; None: `error` has another cause."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    if isinstance(error, RingError):
        # The native module names the missing resource, but does not always know the rank.
        nameless = "raise `ulimit" in str(error) and "rank " not in str(error)
        return RingError(f"rank {rank}: {error}") if nameless else None
    if number not in _LACKS:
        return None
    return RingError(f"rank {rank}: {str(error) or os.strerror(number)}{limit_to_raise(number)}")
