"""State, ObjectState: what ranks keep in common while ranks die and come."""

from __future__ import annotations

import copy
import functools
import queue
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from torch_ring import world
from torch_ring.collectives.objects import broadcast_checked_object, broadcast_object
from torch_ring.errors import HostsUpdatedInterrupt

__all__ = ["ADDED", "REMOVED", "ObjectState", "State", "require_plain"]

REMOVED, ADDED = 1, 2  # of Horovod's HostUpdateResult

_MOST_LOOKED_AT = 10_000  # parts of an attribute: a model is near its top


class State(ABC):
    """The state of a training that goes on when the ranks change; see `run`.

    A subclass says how to save, restore and synchronise it.
    """

    def __init__(self, **_: Any) -> None:
        self._host_messages: queue.Queue[tuple[Any, int]] = queue.Queue()
        self._last_updated_timestamp: Any = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these functions after each change of the ranks, before the training goes on.

        Use them for what depends on the number of ranks, such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks: the ranks are others, and have one state. Called by `run`."""
        self._host_messages = queue.Queue()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: Any, update_res: int) -> None:
        """Note that hosts have come or gone. Thread: any."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and let hosts that wait come in.

        Raises:
            HostsUpdatedInterrupt: hosts have come or gone; `run` handles it.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 knows of new hosts. Collective."""
        last, results = self._last_updated_timestamp, 0
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > last:
                last, results = timestamp, results | result
        before, self._last_updated_timestamp, results = broadcast_object(
            (self._last_updated_timestamp, last, results), 0, "elastic.hosts"
        )
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(results == REMOVED)

    def on_arrival(self) -> None:
        """Give way to the other ranks' states: this process has come while they train."""
        return

    def resume(self) -> None:
        """Make the state the same on all ranks after some have died or come. Collective."""
        self.restore()
        self.sync()

    @abstractmethod
    def save(self) -> None:
        """Keep the present state, for `restore`."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Give all ranks the saved state of rank 0. Collective."""

    def reset(self) -> None:  # noqa: B027  most need nothing
        """Adapt what depends on the world; called before `resume`."""


class ObjectState(State):
    """A state of picklable attributes.

    Args:
        bcast_object: returns the root's object on all ranks, as `broadcast_object` does; by
            default, once it has been compared with what the root has sent.
        get_rank: returns the rank.
        **kwargs: the attributes, with their first values.

    Raises:
        ValueError: an attribute holds a module or an optimizer.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_checked_object,
        get_rank: Callable[[], int] = world.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, value in kwargs.items():
            require_plain(name, value)
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._saved_state: dict[str, Any] = kwargs
        self._set_attributes()

    def save(self) -> None:
        """See `State`."""
        self._saved_state = {name: copy.deepcopy(self.__dict__[name]) for name in self._saved_state}

    def restore(self) -> None:
        """See `State`."""
        self._set_attributes()

    def sync(self) -> None:
        """See `State`."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state, 0, name="elastic.state")
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def require_plain(name: str, value: Any) -> None:
    """Raise ValueError if an attribute holds a module or an optimizer: a copy of it would be kept.

    The program would train its own, and the state would save, give and restore the other.
    """
    seen: set[int] = set()
    parts = deque([value])
    while parts and len(seen) < _MOST_LOOKED_AT:
        part = parts.popleft()
        if isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
            raise ValueError(
                f"the attribute '{name}' of an elastic state holds a {type(part).__name__}, and a "
                "state keeps copies of its attributes: give TorchState each module and optimizer "
                "by a name of its own, and an object that uses one only if it has state_dict() and "
                "load_state_dict()"
            )
        if id(part) not in seen:
            seen.add(id(part))
            parts.extend(_parts_of(part))


def _parts_of(value: Any) -> Sequence[Any]:
    if isinstance(value, (str, bytes, torch.Tensor, type, types.ModuleType)):
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (Sequence, Set, deque)):
        return list(value)
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    return list(getattr(value, "__dict__", {}).values())
