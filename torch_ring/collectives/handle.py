# SPDX-License-Identifier: Apache-2.0
"""Handle: the pending result of an asynchronous operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torch_ring._C import COLLECTIVES, Work
from torch_ring._C import empty_result_like as _empty_result_like
from torch_ring.errors import InvalidArgumentError

__all__ = [
    "GroupHandle",
    "Handle",
    "checked_group",
    "empty_result_like",
    "is_recorded",
    "needs_function",
    "poll",
    "require_tensor",
    "synchronize",
    "written_in_place",
]


ResultT = TypeVar("ResultT")


def empty_result_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor for a result; a tensor subclass makes its own."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return _empty_result_like(tensor)
    return torch.empty_like(tensor, requires_grad=False)


def require_tensor(tensor: object, operation: str) -> None:
    """Raise TypeError, with the operation's name, if `tensor` is no tensor."""
    if not isinstance(tensor, Tensor):
        found = type(tensor).__name__
        remedy = _remedy(operation, tensor)
        raise TypeError(f"{operation} takes a torch.Tensor, not {found}{remedy}")


def _remedy(operation: str, value: object) -> str:
    """Return the advice for an argument that is no tensor; "" if there is none."""
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        collective = operation.removesuffix("_").removesuffix("_async")
        grouped = any(each.has_groups for each in COLLECTIVES if each.name == collective)
        return f": use grouped_{operation}" if grouped else ": use torch.stack()"
    if isinstance(value, (int, float, list, tuple)) or hasattr(value, "__array__"):
        return ": use torch.as_tensor()"
    return ""


def is_recorded(tensor: Tensor) -> bool:
    """Return whether autograd records operations on the tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def needs_function(tensor: Tensor) -> bool:
    """Return whether an operation on the tensor must be an autograd.Function.

    Inside ``torch.func`` it must be one, too: torch refuses it there, before anything is sent.
    """
    return is_recorded(tensor) or torch._C._are_functorch_transforms_active()


def checked_group(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of a group as a list.

    Raises:
        ValueError: the group is no sequence of tensors, or its tensors are on several devices.
    """
    is_group = isinstance(tensors, Iterable) and not isinstance(tensors, Tensor)
    group = list(tensors) if is_group else []
    if not is_group or not all(isinstance(tensor, Tensor) for tensor in group):
        found = type(tensors).__name__
        raise InvalidArgumentError(f"a group is a list of tensors, such as [a, b]; got {found}")
    devices = {str(tensor.device) for tensor in group}
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"the tensors of a group are on several devices: {sorted(devices)}"
        )
    return group


def written_in_place(handle: Handle[Tensor], tensor: Tensor) -> Handle[Tensor]:
    """Tell autograd that `tensor` changes, so that backward with its old value is an error."""
    torch.autograd.graph.increment_version(tensor)
    return handle


class Handle(Generic[ResultT]):
    """The pending result of an ``*_async`` operation."""

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Work, finish: Callable[[Tensor], ResultT] | None = None) -> None:
        self._work: Work | None = work
        self._finish = finish

    def done(self) -> bool:
        """Return whether the operation has completed, successfully or not."""
        return self._work is None or self._work.done()

    def wait(self) -> ResultT:
        """Block until the operation is done and return its result.

        Returns:
            The result the first time, None from then on.

        Raises:
            MismatchError: the ranks called different operations; the job may go on.
            PeerLostError: a rank is gone or silent.
            TimeoutError: a rank is late.
        """
        if self._work is None:
            return None  # type: ignore[return-value]
        work, self._work = self._work, None
        result = work.wait()
        if self._finish is None:
            return result  # type: ignore[return-value]  # a Handle[Tensor]
        return self._finish(result)


class GroupHandle(Handle[ResultT]):
    """The handle of several operations; its result combines theirs."""

    __slots__ = ("_finish_group", "_works")

    def __init__(
        self,
        works: Sequence[Work],
        finish: Callable[[list[Tensor]], ResultT] = list,  # type: ignore[assignment]
    ) -> None:
        self._works: Sequence[Work] | None = works
        self._finish_group = finish

    def done(self) -> bool:
        """Return whether all operations have completed, successfully or not."""
        return self._works is None or all(work.done() for work in self._works)

    def wait(self) -> ResultT:
        """Block until all operations are done, even if one fails, and return their results.

        Returns:
            The results the first time, None from then on.

        Raises:
            RingError: the first failure: MismatchError, PeerLostError or TimeoutError.
        """
        if self._works is None:
            return None  # type: ignore[return-value]
        works, self._works = self._works, None
        results: list[Tensor] = []
        first_error: Exception | None = None
        waited: Work | None = None
        for work in works:
            try:
                results.append(work.wait(waited))
                waited = work
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return self._finish_group(results)


def _checked(handle: Handle[ResultT]) -> Handle[ResultT]:
    if not isinstance(handle, Handle):
        raise InvalidArgumentError(f"{handle!r} is not a handle of an asynchronous operation")
    return handle


def poll(handle: Handle[Any]) -> bool:
    """Return whether an operation is done, so that :func:`synchronize` would not block.

    Args:
        handle: the handle that an ``*_async`` operation has returned.

    Returns:
        True if it has completed, successfully or not.

    Raises:
        ValueError: `handle` is not the handle of an ``*_async`` operation.
    """
    return _checked(handle).done()


def synchronize(handle: Handle[ResultT]) -> ResultT:
    """Block until an operation is done and return its result.

    Args:
        handle: the handle that an ``*_async`` operation has returned.

    Returns:
        The operation's result the first time, None from then on.

    Raises:
        ValueError: `handle` is not the handle of an ``*_async`` operation.
        MismatchError: the ranks called different operations; the job may go on.
        PeerLostError: a rank is gone or silent.
        TimeoutError: a rank is late.
    """
    return _checked(handle).wait()
