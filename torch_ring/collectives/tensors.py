"""require_tensor, empty_result_like, ...: checks of arguments, and memory for results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_ring._C import empty_result_like as _empty_result_like
from torch_ring.collectives.handle import Handle
from torch_ring.errors import InvalidArgumentError

__all__ = [
    "checked_group",
    "empty_result_like",
    "is_recorded",
    "needs_function",
    "require_tensor",
    "written_in_place",
]


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
    """Return how to give what is no tensor, if there is a way."""
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        collective = operation.removesuffix("_").removesuffix("_async")
        grouped = collective in ("allreduce", "allgather", "reducescatter")
        return f": use grouped_{operation}" if grouped else ": use torch.stack()"
    if isinstance(value, (int, float, list, tuple)) or hasattr(value, "__array__"):
        return ": use torch.as_tensor()"
    return ""


def is_recorded(tensor: Tensor) -> bool:
    """Return whether autograd records operations on the tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def needs_function(tensor: Tensor) -> bool:
    """Return whether an operation on the tensor must be an autograd.Function.

    It must be one inside ``torch.func`` too: torch refuses it there, before anything is sent.
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


def written_in_place(handle: Handle, tensor: Tensor) -> Handle:
    """Tell autograd that `tensor` changes, so that backward with its old value is an error."""
    torch.autograd.graph.increment_version(tensor)
    return handle
