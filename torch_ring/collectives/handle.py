"""Handle: the pending result of an asynchronous operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torch_ring._C import Work
from torch_ring.errors import InvalidArgumentError

__all__ = [
    "GroupHandle",
    "Handle",
    "poll",
    "synchronize",
]


class Handle:
    """The pending result of an ``*_async`` operation."""

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Work, finish: Callable[[Tensor], Any] | None = None) -> None:
        self._work: Work | None = work
        self._finish = finish

    def done(self) -> bool:
        """Return whether the operation has completed, successfully or not."""
        return self._work is None or self._work.done()

    def wait(self) -> Any:
        """Block until the operation is done and return its result.

        Returns:
            The result the first time, None from then on.

        Raises:
            MismatchError: the ranks called different operations; the job may go on.
            PeerLostError: a rank is gone or silent.
            TimeoutError: a rank is late.
        """
        if self._work is None:
            return None
        work, self._work = self._work, None
        result = work.wait()
        return result if self._finish is None else self._finish(result)


class GroupHandle(Handle):
    """The handle of several operations; its result is made of all their results."""

    __slots__ = ("_finish_group", "_works")

    def __init__(self, works: Sequence[Work], finish: Callable[[list[Tensor]], Any] = list) -> None:
        self._works: Sequence[Work] | None = works
        self._finish_group = finish

    def done(self) -> bool:
        """Return whether all operations have completed, successfully or not."""
        return self._works is None or all(work.done() for work in self._works)

    def wait(self) -> Any:
        """Block until all operations are done, even if one fails, and return their results.

        Returns:
            The results the first time, None from then on.

        Raises:
            RingError: the first failure: MismatchError, PeerLostError or TimeoutError.
        """
        if self._works is None:
            return None
        works, self._works = self._works, None
        results: list[Tensor] = []
        first_error: Exception | None = None
        for work in works:
            try:
                results.append(work.wait())
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return self._finish_group(results)


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise InvalidArgumentError(f"{handle!r} is not a handle of an asynchronous operation")
    return handle


def poll(handle: Handle) -> bool:
    """Return whether an operation is done, so that :func:`synchronize` would not block.

    Args:
        handle: what an ``*_async`` operation has returned.

    Returns:
        True if it has completed, successfully or not.

    Raises:
        ValueError: `handle` is not the handle of an ``*_async`` operation.
    """
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Block until an operation is done and return its result.

    Args:
        handle: what an ``*_async`` operation has returned.

    Returns:
        The operation's result the first time, None from then on.

    Raises:
        ValueError: `handle` is not the handle of an ``*_async`` operation.
        MismatchError: the ranks called different operations; the job may go on.
        PeerLostError: a rank is gone or silent.
        TimeoutError: a rank is late.
    """
    return _checked(handle).wait()
