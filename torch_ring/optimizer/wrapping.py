"""wrap: adds methods to an optimizer in place, by subclassing its class."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

import torch

__all__ = ["Wrapped", "wrap"]

WrappedT = TypeVar("WrappedT", bound="Wrapped")


class Wrapped(torch.optim.Optimizer):
    """The base class of methods that :func:`wrap` adds to a user's class."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as an optimizer of the user's class: the reading process may have no world."""
        return object.__new__, (type(self).__bases__[1],), self.__getstate__()


def wrap(optimizer: torch.optim.Optimizer, addition: type[WrappedT]) -> WrappedT:
    """Make `optimizer` an instance of a subclass of `addition` and of its own class.

    Its state, hyper-parameters, hooks and schedulers stay; the class keeps its name.
    """
    cls: type = type(optimizer)
    added: type = addition
    wrapped = cast(WrappedT, optimizer)
    wrapped.__class__ = _class_of(cls, added)
    return wrapped


@functools.cache
def _class_of(cls: type, addition: type) -> Any:
    described = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (addition, cls), described)
