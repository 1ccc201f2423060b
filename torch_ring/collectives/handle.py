"""The pending result of an asynchronous operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ring import _C

__all__ = [
    "GroupHandle",
    "Handle",
    "empty_result_like",
    "is_recorded",
    "needs_function",
    "poll",
    "require_tensor",
    "synchronize",
]


class Handle:
    """What an ``*_async`` operation returns; give it to :func:`synchronize` or :func:`poll`."""

    __slots__ = ("_finish", "_work")

    def __init__(self, work: _C.Work, finish: Callable[[Tensor], Any] | None = None) -> None:
        self._work: _C.Work | None = work
        self._finish = finish

    def done(self) -> bool:
        """Return whether the operation has completed, successfully or not."""
        return self._work is None or self._work.done()

    def wait(self) -> Any:
        """Block until the operation is done and return its result.

        Returns:
            The result tensor the first time, None from then on.

        Raises:
            MismatchError: the ranks asked for different things; the job may go on.
            PeerLostError, TimeoutError: a rank is gone, or silent.
        """
        if self._work is None:
            return None
        work, self._work = self._work, None
        result = work.wait()
        return result if self._finish is None else self._finish(result)


class GroupHandle(Handle):
    """The handle of operations that complete together; its result is made of all of theirs."""

    __slots__ = ("_finish_group", "_works")

    def __init__(
        self, works: Sequence[_C.Work], finish: Callable[[list[Tensor]], Any] = list
    ) -> None:
        self._works: Sequence[_C.Work] | None = works
        self._finish_group = finish

    def done(self) -> bool:
        """Return whether all operations have completed, successfully or not."""
        return self._works is None or all(work.done() for work in self._works)

    def wait(self) -> Any:
        """Block until all operations are done; see :meth:`Handle.wait`. Raises the first error."""
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


def empty_result_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor for a result; tensors of other classes make their own."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return _C.empty_result_like(tensor)
    return torch.empty_like(tensor, requires_grad=False)


def require_tensor(tensor: object, operation: str) -> None:
    """Raise TypeError if what an operation was given is no tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation} takes a torch.Tensor, not {type(tensor).__name__}")


def is_recorded(tensor: Tensor) -> bool:
    """Return whether autograd has to know what is done to the tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def needs_function(tensor: Tensor) -> bool:
    """Return whether an operation must be an autograd.Function: also inside of ``torch.func``.

    That refuses it there before anything is sent.
    """
    return is_recorded(tensor) or torch._C._are_functorch_transforms_active()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is not a handle of an asynchronous operation")
    return handle


def poll(handle: Handle) -> bool:
    """Return whether the operation is done, so that :func:`synchronize` would not block.

    Raises:
        ValueError: `handle` is not one that an ``*_async`` operation returned.
    """
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Block until the operation is done and return its result; see :meth:`Handle.wait`."""
    return _checked(handle).wait()
