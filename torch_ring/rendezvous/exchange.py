"""SetupExchange: the failures that ranks tell one another while they make connections."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Protocol, TypeVar

from torch_ring._C import limit_to_raise
from torch_ring.errors import PeerLostError, RingError
from torch_ring.rendezvous.deadline import Deadline

__all__ = ["SetupExchange", "failing_together", "lacking"]

Cause = TypeVar("Cause", bound=BaseException)

_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # the last: of threads


class SetupExchange(Protocol):
    """One rank's side of an exchange beside the connections that ranks are about to make."""

    rank: int
    deadline: Deadline

    def check(self) -> None:
        """Raise the failure of another rank, if there is one. Does not block."""

    def explain(self, error: RingError) -> RingError:
        """Return another rank's failure that caused `error`, or `error` itself."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed with `error`."""


@contextlib.contextmanager
def failing_together(exchange: SetupExchange) -> Iterator[None]:
    """Make a failure inside the context a failure of all ranks.

    Raises:
        RingError: another rank's failure, where a lost connection is only its consequence.
        BaseException: the exception raised inside; the other ranks have been told.
    """
    try:
        yield
    except PeerLostError as error:
        raise _told(exchange, exchange.explain(error)) from None
    except (OSError, MemoryError, RingError) as error:
        raise _told(exchange, lacking(error, exchange.rank) or error) from None
    except BaseException as error:
        exchange.fail(error)
        raise


def lacking(error: BaseException, rank: int) -> RingError | None:
    """Return the error that says which limit to raise on `rank`; None if it lacks nothing."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    if isinstance(error, RingError):
        # The native module says what this process lacks, but does not know its rank everywhere.
        nameless = "raise `ulimit" in str(error) and "rank " not in str(error)
        return RingError(f"rank {rank}: {error}") if nameless else None
    if number not in _LACKS:
        return None
    return RingError(f"rank {rank}: {str(error) or os.strerror(number)}{limit_to_raise(number)}")


def _told(exchange: SetupExchange, cause: Cause) -> Cause:
    """Return `cause` after the other ranks know it.

    No local variable above holds it: its traceback would keep that frame, and its engine, alive.
    """
    exchange.fail(cause)
    return cause
