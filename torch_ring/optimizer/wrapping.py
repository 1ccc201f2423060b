# SPDX-License-Identifier: Apache-2.0
"""wrapped: adds methods to an optimizer in place, by subclassing its class."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torch_ring.errors import InvalidArgumentError
from torch_ring.world import current

__all__ = ["Copied", "Wrapped", "checked_names", "require_known", "unnamed", "wrapped"]


def checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the optimizer's parameters in order, with their names.

    Raises:
        ValueError: `named_parameters` are no pairs, or not unique, or lack a parameter.
    """
    if named_parameters is None:
        return {
            parameter: unnamed(number, index)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [None]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters must be pairs of names and parameters: give model.named_parameters()"
        )
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise ValueError(f"named_parameters has names that are not unique: {', '.join(repeated)}")
    name_of = {parameter: name for name, parameter in reversed(named)}  # tied: the first name
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = sum(parameter not in name_of for parameter in parameters)
    if missing:
        raise ValueError(
            f"named_parameters lacks {missing} of the {len(parameters)} parameters of the "
            "optimizer: is it of the same model?"
        )
    return {parameter: name_of[parameter] for parameter in parameters}


def unnamed(group: int, index: int) -> str:
    """Return Horovod's name for a parameter without a name."""
    return f"allreduce.noname.{group}.{index}"


WrappedT = TypeVar("WrappedT", bound="Wrapped")

_COPY_HOOK = -1  # the id of _refuse_copy() among the step's hooks; torch's ids begin at 0


class Wrapped(torch.optim.Optimizer):
    """The base class of the classes whose methods :func:`wrapped` adds to a user's class.

    A method named `_after_X` is called after torch's method `X`. If an optimizer is wrapped twice
    (`DiLoCo(DistributedOptimizer(...))`), the methods of both are called, those of the inner one
    first.
    """

    _user_class: type[torch.optim.Optimizer]  # the optimizer's class before it was wrapped
    _wrapped_by = "DistributedOptimizer"  # the public function that wrapped it last

    def _after_zero_grad(self) -> None:
        pass

    def _after_load_state_dict(self) -> None:
        pass

    def _after_add_param_group(self) -> None:
        pass

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        hooks = OrderedDict({_COPY_HOOK: _refuse_copy})  # torch copies no other hooks
        state = {**self.__getstate__(), "_optimizer_step_pre_hooks": hooks}
        state["_wrapped_by"] = self._wrapped_by
        return _new_copy, (self._user_class,), state


class Copied(Wrapped):
    """A copy of a wrapped optimizer, until it is wrapped itself.

    It steps like the user's class, except in a world of several ranks, where ``step()`` raises: no
    reducer has averaged its gradients.
    """


def _new_copy(cls: type) -> Any:
    added: type = Copied
    return object.__new__(_class_of(cls, added))


def _refuse_copy(
    optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> None:
    """Step pre-hook of copies."""
    assert isinstance(optimizer, Copied)
    world = current.find_world()
    if world is not None and current.size() > 1:
        name, wrapper = type(optimizer).__name__, optimizer._wrapped_by
        raise InvalidArgumentError(
            f"rank {current.rank()}: this {name} is a copy of a {wrapper} (by deepcopy, pickle or "
            "torch.load), which would step with the gradients of this rank alone: wrap it, as in "
            f"optimizer = hvd.{wrapper}(optimizer), before backward(). If each "
            f"rank is to step by itself, make another {name}, and load_state_dict() of this one's "
            "state_dict()"
        )


def require_known(groups: Sequence[Sequence[Tensor]], known: Container[Tensor], verb: str) -> None:
    """Raise ValueError for parameters that a wrapped optimizer does not know.

    Args:
        groups: the parameters of each of its groups.
        known: the parameters that it knows.
        verb: the participle for the error text, such as "reduced".
    """
    unknown = [
        (number, index)
        for number, params in enumerate(groups)
        for index, parameter in enumerate(params)
        if parameter not in known
    ]
    if unknown:
        number, index = unknown[0]
        raise ValueError(
            f"{len(unknown)} parameters of the optimizer have been put into its param_groups by "
            f"hand, and are not {verb}: use add_param_group(), or wrap a new optimizer. The first "
            f"is param_groups[{number}]['params'][{index}]"
        )


@contextlib.contextmanager
def wrapped(optimizer: torch.optim.Optimizer, addition: type[WrappedT]) -> Iterator[WrappedT]:
    """Make `optimizer` an instance of a subclass of its own class, with the methods of `addition`.

    Its state, hyper-parameters, hooks and schedulers stay; the class keeps its name. If the body of
    the context raises, the optimizer is restored.

    Raises:
        InvalidArgumentError: its class cannot be subclassed, or does not call hooks in ``step()``.
    """
    cls, attributes = type(optimizer), dict(vars(optimizer))
    user_class: type = optimizer._user_class if isinstance(optimizer, Copied) else cls
    added: type = addition
    try:
        optimizer.__class__ = _class_of(user_class, added)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{cls.__name__} cannot be wrapped, as Python makes no subclass of it: {error}"
        ) from error
    try:
        _ensure_hooks(optimizer)
        vars(optimizer).pop("_wrapped_by", None)  # of a copy
        yield cast(WrappedT, optimizer)
        optimizer._optimizer_step_pre_hooks.pop(_COPY_HOOK, None)  # if it was a copy
    except BaseException:
        optimizer.__class__ = cls
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        raise


@functools.cache
def _class_of(cls: type, addition: type) -> Any:
    """Return a subclass of both.

    Python can change the class of an instance only if the memory layout stays, so `cls` must be the
    first base. The methods of `addition` are copied into the new class itself: otherwise those of
    `cls` would take precedence.
    """
    described = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    extended = {name: _extended(cls, name, addition) for name in _EXTENDED}
    added = {name: value for name, value in vars(addition).items() if name not in _OF_A_CLASS}
    bases = (addition,) if issubclass(addition, cls) else (cls, addition)
    user_class = getattr(cls, "_user_class", cls)
    namespace = {**extended, **added, **described, "_user_class": user_class}
    return type(cls)(cls.__name__, bases, namespace)


_EXTENDED = ("zero_grad", "load_state_dict", "add_param_group")
_OF_A_CLASS = frozenset(vars(type("_", (), {})))


def _extended(cls: type, name: str, addition: type[Wrapped]) -> Callable[..., Any]:
    method, after = getattr(cls, name), getattr(addition, f"_after_{name}")

    @functools.wraps(method, updated=())
    def extended(self: Wrapped, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        after(self)
        return result

    return extended


def _ensure_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Make ``step()`` call hooks even if the class does not call ``Optimizer.__init__``.

    An example is a class that delegates everything to another optimizer.
    """
    attributes = vars(optimizer)
    if "_optimizer_step_pre_hooks" in attributes:
        return
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        attributes[name] = OrderedDict()
    optimizer._patch_step_function()
    if not getattr(optimizer.step, "hooked", False):
        raise InvalidArgumentError(
            f"the step() of this {type(optimizer).__name__} has been replaced, by a scheduler "
            "perhaps, and calls no hooks: wrap the optimizer first"
        )
