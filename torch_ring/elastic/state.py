# SPDX-License-Identifier: Apache-2.0
"""TorchState: models, optimizers, samplers and plain attributes of an elastic training."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import queue
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set, Sized
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Sampler

from torch_ring import world
from torch_ring.collectives.compare import Thing, describe_difference, find_damage, things_of
from torch_ring.collectives.objects import (
    allgather_object,
    broadcast_checked_object,
    broadcast_object,
)
from torch_ring.elastic.sampler import ElasticSampler
from torch_ring.errors import HostsUpdatedInterrupt, PeerLostError, RingError, StateDamagedError
from torch_ring.optimizer.adasum_optimizer import AdasumOptimizer
from torch_ring.optimizer.distributed_optimizer import (
    follow_world,
    has_moved,
    require_survivors,
)
from torch_ring.optimizer.loaded_rate import RANKS
from torch_ring.optimizer.local_steps import LocalStepsOptimizer
from torch_ring.state import broadcast_nested, broadcast_parameters, copy_optimizer_state
from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = [
    "ADDED",
    "REMOVED",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "RanksUpdatedInterrupt",
    "State",
    "StateHandler",
    "StateLostError",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

REMOVED, ADDED = 1, 2  # as in Horovod's HostUpdateResult

_MOST_LOOKED_AT = 10_000  # parts of an attribute: a model, if any, is near the top
_MOST_MARK_BYTES = 1 << 16  # largest pickle of an attribute to compare in each step


class RanksUpdatedInterrupt(HostsUpdatedInterrupt):
    """Ranks want to join or to leave; raised on all ranks at the same step."""


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

        Use them for values that depend on the number of ranks, such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks after a change of the ranks. Called by `run`."""
        self._host_messages = queue.Queue()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: Any, update_res: int) -> None:
        """Note that hosts have joined or left. Thread: any."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and let waiting hosts join.

        Raises:
            HostsUpdatedInterrupt: hosts have joined or left; `run` handles it.
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
            raise RanksUpdatedInterrupt(results == REMOVED)

    def on_arrival(self) -> None:
        """Drop this process's state: it has joined a running job, and takes the others' state."""
        return

    def resume(self) -> None:
        """Make the state the same on all ranks after some have died or joined. Collective."""
        self.restore()
        self.sync()

    @abstractmethod
    def save(self) -> None:
        """Keep the present state, for `restore`."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the last saved state."""

    @abstractmethod
    def sync(self) -> None:
        """Give all ranks the saved state of rank 0. Collective."""

    def reset(self) -> None:  # noqa: B027  most need nothing
        """Adapt the parts that depend on the world; called before `resume`."""


class ObjectState(State):
    """A state of picklable attributes.

    Args:
        bcast_object: returns the root's object on all ranks, as `broadcast_object` does; the
            default also compares the received bytes with the root's.
        get_rank: returns the rank.
        **kwargs: the attributes, with their first values.

    Raises:
        ValueError: an attribute holds a module or an optimizer, or has the name of a method.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_checked_object,
        get_rank: Callable[[], int] = world.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._bcast_object = bcast_object
        self._rank = get_rank
        for name, value in kwargs.items():
            if hasattr(type(self), name):
                raise ValueError(
                    f"the class {type(self).__name__} has a '{name}' of its own: leave it out "
                    "there, or choose another name"
                )
            require_plain(name, value)
        self._values: dict[str, Any] = kwargs  # the attributes
        ObjectState.save(self)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_values", ()):
            require_plain(name, value)
            self._values[name] = value
        else:
            super().__setattr__(name, value)

    def save(self) -> None:
        """See `State`."""
        self._saved_state = copy.deepcopy(self._values)

    def restore(self) -> None:
        """See `State`."""
        self._values = copy.deepcopy(self._saved_state)

    def sync(self) -> None:
        """See `State`."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state, 0, name="elastic.state")
            ObjectState.restore(self)


def require_plain(name: str, value: Any) -> None:
    """Raise ValueError if an attribute holds a module or an optimizer.

    The state would keep a copy of it, and save, send and restore the copy, while the program trains
    the original.
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


def mark_of(value: Any) -> Any:
    """Return a mark that changes with an attribute, even if it changes in place.

    For a large value it is only the identity and the length.
    """
    if value is None or isinstance(value, (int, float, complex, str, bytes)):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    marker = _Marker()
    try:
        pickle.dump(value, marker, pickle.HIGHEST_PROTOCOL)
    except Exception:  # any: pickling calls the value's own methods
        return id(value), len(value) if isinstance(value, Sized) else 0
    return marker.mark


class _Marker:
    """A file for the pickle of an attribute, of at most `_MOST_MARK_BYTES`."""

    def __init__(self) -> None:
        self.mark = b""

    def write(self, data: bytes) -> None:
        self.mark += data
        if len(self.mark) > _MOST_MARK_BYTES:
            raise OverflowError


class StateHandler:
    """Saves, restores and synchronises one value of a `TorchState`.

    Its own ways are for values with ``state_dict()`` and ``load_state_dict()``. A handler of other
    values has its own `save`, `restore` and `copy_from`.
    """

    is_small = False  # whether even ranks with the same steps take the root's value

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Handle another value, and save it."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep the present state of the value."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to the last saved state."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def copy_from(self, root: int) -> None:
        """Give all ranks the present state of the root's value. Collective."""
        state = broadcast_checked_object(self.value.state_dict(), root, "elastic.stateful")
        if world.rank() != root:
            self.value.load_state_dict(state)

    def contents(self) -> Mapping[str, Any]:
        """Return the contents that `copy_from` has received, to compare them with the root's.

        Returns:
            Tensors, numbers and texts by name, the same on all ranks; none by default.
        """
        return {}

    def sync(self) -> None:
        """Give all ranks the state of rank 0's value, and save it. Collective."""
        self.copy_from(0)
        self.save()

    def reset(self) -> None:
        """Adapt the value to a new world. Collective."""

    def beginning(self) -> Any:
        """Return the state for `rewind`, before the first step of a batch; None: it has none."""
        return None

    def rewind(self, beginning: Any) -> None:
        """Go back to the beginning of the batch; steps already taken remain."""


class ModelStateHandler(StateHandler):
    """Handles a module: its parameters and buffers."""

    def restore(self) -> None:
        """See `StateHandler`. It needs no copy: a module copies what it loads."""
        self.value.load_state_dict(self._saved)

    def copy_from(self, root: int) -> None:
        """See `StateHandler`."""
        broadcast_parameters(self.value.state_dict(), root)

    def contents(self) -> Mapping[str, Any]:
        """See `StateHandler`."""
        state = self.value.state_dict()
        return {f"'{k}'": value for k, value in state.items() if isinstance(value, torch.Tensor)}


class OptimizerStateHandler(StateHandler):
    """Handles an optimizer, wrapped or not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, AdasumOptimizer):  # takes its local step before it can fail
            raise ValueError("elastic training does not go with op=Adasum")
        require_survivors(optimizer)
        super().__init__(optimizer)

    def save(self) -> None:
        """See `StateHandler`."""
        super().save()
        self._saved[RANKS] = None  # other ranks are usual here: no warning

    def copy_from(self, root: int) -> None:
        """See `StateHandler`."""

        def send(packed: Any) -> Any:
            return broadcast_checked_object(packed, root, "elastic.optimizer")

        copy_optimizer_state(self.value, root, global_process_set, send)

    def contents(self) -> Mapping[str, Any]:
        """See `StateHandler`."""
        return {thing.name: thing.value for thing in things_of(self.value, {})}

    def reset(self) -> None:
        """See `StateHandler`."""
        follow_world(self.value)

    def beginning(self) -> Any:
        """See `StateHandler`. The hyper-parameters, which schedulers change."""
        return settings_of(self.value)

    def rewind(self, beginning: Any) -> None:
        """See `StateHandler`."""
        set_settings(self.value, beginning)


class LocalStepsHandler(OptimizerStateHandler):
    """Handles an optimizer of LocalSGD or DiLoCo, whose ranks have parameters of their own."""

    def sync(self) -> None:
        """See `StateHandler`."""
        self._load_round(broadcast_nested(self.value._rounds.state()), 0)
        super().sync()

    def _load_round(self, state: Mapping[str, Any] | None, root: int) -> None:
        if world.rank() != root and state is not None:  # the root may have no round
            self.value._rounds.load(state)

    def reset(self) -> None:
        """See `StateHandler`."""
        super().reset()
        self.value._rounds.follow_world()

    def take_round(self, *, has_own: bool, steps: int, replaces: Callable[[bool], None]) -> None:
        """Bring all ranks into the same round. Collective.

        The round is that of the rank that has ended the most rounds. A rank that has ended as many
        keeps its parameters, so that its steps in this round count. Others take the agreed
        parameters. Ranks that average their gradients take everything from the farthest of them.

        Args:
            has_own: whether this rank's parameters come from its own steps.
            steps: the number of steps that this rank has taken.
            replaces: told whether this rank's own parameters are overwritten, before they are.
        """
        rounds = self.value._rounds
        ended = rounds.ended if has_own else []
        own = (has_own, rounds.agrees, rounds.has_begun, sum(ended), ended), (has_own, steps, ended)
        ranks = allgather_object(own, name="elastic.rounds")
        root = max(range(len(ranks)), key=lambda rank: ranks[rank][0])
        neighbour = None
        if rounds.inner is not None and rounds.inner.included():
            near = rounds.inner.ranks or []
            farthest = max(near, key=lambda rank: ranks[rank][1])
            if not has_own or any(ranks[rank][1] != ranks[farthest][1] for rank in near):
                neighbour = farthest
        is_behind = rounds.agrees and ended != ranks[root][0][-1]
        replaces(is_behind or neighbour not in (None, world.rank()))
        state, agreed = broadcast_nested((rounds.state(), rounds.agreed), root)
        self._load_round(state, root)
        for fragment, count in enumerate(rounds.ended):
            if world.rank() != root and ended[fragment : fragment + 1] != [count]:
                rounds.take(fragment, agreed)
        if neighbour is not None:
            self._copy_from_neighbour(neighbour, rounds.inner)

    def _copy_from_neighbour(self, root: int, neighbours: ProcessSet) -> None:
        def send(packed: Any) -> Any:
            return broadcast_object(packed, root, "elastic.neighbours.state", neighbours)

        copy_optimizer_state(self.value, root, neighbours, send)
        parameters = [p for group in self.value.param_groups for p in group["params"]]
        named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
        broadcast_parameters(named, root, neighbours)


class OptimizerCopy:
    """An optimizer and its parameters at one moment."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = [(parameter, parameter.detach().clone()) for parameter in parameters]
        self.settings = settings_of(optimizer)
        # A plain copy: load_state_dict() would cast it to the parameters' dtypes.
        self._state = copy.deepcopy(dict(optimizer.state), {id(p): p for p in parameters})

    @torch.no_grad()
    def restore(self) -> None:
        """Restore that moment. Call it once."""
        for parameter, value in self._parameters:
            parameter.copy_(value)
        set_settings(self.optimizer, self.settings)
        self.optimizer.state.clear()
        self.optimizer.state.update(self._state)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the hyper-parameters of each group."""
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def set_settings(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """Replace the hyper-parameters of the groups that have an entry in `settings`."""
    for group, values in zip(optimizer.param_groups, settings, strict=False):
        for key in group.keys() - values.keys() - {"params"}:
            del group[key]
        group.update(values)


class SamplerStateHandler(StateHandler):
    """Handles an `ElasticSampler`: the progress of all ranks in the epoch."""

    is_small = True

    def sync(self) -> None:
        """Give all ranks the farthest progress of any of them, and save it. Collective."""
        states = allgather_object(self.value.state_dict())
        farthest = max(states, key=lambda state: (state["epoch"], state["processed_num"]))
        self.value.load_state_dict(farthest)
        self.save()

    def reset(self) -> None:
        """See `StateHandler`."""
        self.value.reset()


_MOST_BYTES_A_BATCH = 1 << 20  # of tensors that are copied in each batch


class StatefulHandler(StateHandler):
    """Handles objects with ``state_dict()`` and ``load_state_dict()``, such as schedulers.

    The object itself stays: it may refer to the optimizer or the model.
    """

    is_small = True

    def beginning(self) -> Any:
        """See `StateHandler`. A large state is not copied, and so not rewound."""
        state = self.value.state_dict()
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        is_large = sum(tensor.nbytes for tensor in tensors) > _MOST_BYTES_A_BATCH
        return None if is_large else copy.deepcopy(state)

    def rewind(self, beginning: Any) -> None:
        """See `StateHandler`."""
        self.value.load_state_dict(beginning)


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (LocalStepsOptimizer, LocalStepsHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the pairs of a type and the handler of its instances; the first that fits is used."""
    return list(_registry)


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Use other handlers for states that are made from now on."""
    _registry[:] = registry


def handler_of(value: Any) -> StateHandler | None:
    """Return a handler of a value; None: the value is a plain attribute."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    methods = [getattr(value, name, None) for name in ("state_dict", "load_state_dict")]
    if all(map(callable, methods)) and not isinstance(value, type):
        return StatefulHandler(value)
    return None


_log = logging.getLogger("torch_ring")


class StateLostError(RingError):
    """All ranks with the whole state have died, and the others have only a part of it."""


NONE, PART, WHOLE = range(3)  # the parts of a state that belong together


class _Saved(NamedTuple):
    """The description of a whole saved state."""

    at: tuple[int, int]  # steps and changes
    taken: dict[str, int]
    place: dict[str, Any]
    beginnings: dict[StateHandler, Any]


class _BegunStep(NamedTuple):
    """A step of an optimizer that has begun."""

    name: str  # the optimizer's name
    steps: int  # number of steps taken before it
    before: OptimizerCopy | None  # the state before it, if it was copied
    is_taken: bool  # taken already: this repetition must change nothing


class _Progress(NamedTuple):
    """A rank's description of its state, for the other ranks."""

    progress: tuple[int, int, int, int]  # parts; steps; minus unrecorded steps; changes
    taken: dict[str, int]
    is_at_saved_place: bool
    saved: tuple[tuple[int, int], dict[str, int]] | None
    reads: list[str]


class TorchState(ObjectState):
    """The state of a training with torch, for `run`.

    After a death the survivors usually copy nothing. Gradients are averaged before ``step()``, so a
    failed pass leaves parameters and optimizer unchanged, and the survivors repeat that step. If
    some ranks have taken the step already, the others copy their state. So at most one step is
    lost, no matter how long ago the last `commit` was.

    The training begins again at its place, which is given by the samplers and by the attributes
    that the function reads before its first step (all of them, if it reads none). Steps that one or
    several optimizers have taken since the place last changed are not taken twice: either all ranks
    go back to the last commit, if it was made at this place, or the function does them again, and
    ``step()`` then leaves parameters and optimizer unchanged. docs/elastic.md describes the losses.

    Args:
        model: a module, or None.
        optimizer: an optimizer, wrapped or not, or None.
        **kwargs: other modules, optimizers and ElasticSamplers; schedulers and other objects with
            ``state_dict()`` and ``load_state_dict()``; and plain attributes, which must be
            picklable.

    Raises:
        ValueError: an attribute holds a module or an optimizer, which the state would copy; or an
            optimizer has ``op=Adasum``.
    """

    _is_beginning = False  # the function has been called, and has taken no step yet

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._changes = 0  # number of changes of plain attributes
        self._steps = 0  # number of steps of all optimizers
        self._parts = NONE
        self._saved: _Saved | None = None  # the last whole state saved
        self._taken: dict[str, int] = {}  # steps of each optimizer since the place changed
        self._again: dict[str, int] = {}  # those of them that the function must still repeat
        self._beginnings: dict[StateHandler, Any] = {}  # of the batch of these steps
        self._begun: list[_BegunStep] = []  # steps that have not ended
        self._last_hooks: dict[str, tuple[Any, int]] = {}  # pre-step hooks, by optimizer
        self._place: dict[str, Any] = {}  # marks of attributes and samplers at the last step
        self._reads: set[str] = set()  # attributes that the function has read before a first step
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = handler_of(value)
            if handler is not None:
                handler.save()
                self._handlers[name] = handler
                self._count_steps_of(name, value)
            elif name in kwargs or value is not None:
                plain[name] = value
        super().__init__(**plain)

    def __getattr__(self, name: str) -> Any:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            return handlers[name].value
        value = super().__getattr__(name)
        if self._is_beginning:
            self._reads.add(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
            self._count_steps_of(name, value)
            return
        super().__setattr__(name, value)
        if name in self.__dict__.get("_values", ()):
            self._changes += 1

    def save(self) -> None:
        """See `State`."""
        self._forget_known_steps()
        for handler in self._handlers.values():
            handler.save()
        super().save()
        if self._parts == WHOLE:
            self._note_saved()

    def restore(self) -> None:
        """See `State`."""
        for handler in self._in_order():
            handler.restore()
        super().restore()
        taken: dict[str, int] = {}
        if self._saved is not None:
            (self._steps, self._changes), taken, _, beginnings = self._saved
            self._beginnings = dict(beginnings)
        self._begin_at(taken)

    def sync(self) -> None:
        """See `State`."""
        for optimizer, hook in self._last_hooks.values():  # behind hooks that may fail
            optimizer._optimizer_step_pre_hooks.move_to_end(hook)
        self._parts = NONE
        for handler in self._in_order():
            handler.sync()
        super().sync()
        self._parts = WHOLE
        self._begin_at({})
        self._note_saved()

    def reset(self) -> None:
        """See `State`."""
        for handler in self._handlers.values():
            handler.reset()

    def on_arrival(self) -> None:
        """See `State`."""
        self._parts, self._saved = NONE, None

    def on_reset(self) -> None:
        """See `State`. Changes by the callbacks do not change the place."""
        self._is_beginning = False
        super().on_reset()
        self._place = self._find_place()
        self._is_beginning = True

    def resume(self) -> None:
        """Go on from the farthest rank's state, or from the last commit. Collective.

        Only whole states count. A newcomer has none, nor has a rank that a failure has interrupted
        while it copied a state. If no rank has a whole state, the farthest saved one counts.

        Raises:
            StateLostError: on all ranks: only parts of a state are left.
        """
        self._undo_begun_steps()
        self._forget_known_steps()
        if not self._place:  # nothing records the place, so no step is repeated
            self._taken = {}
        own = _Progress(
            (self._parts, self._steps, -sum(self._taken.values()), self._changes),
            self._taken,
            self._is_at_saved_place(),
            None if self._saved is None else self._saved[:2],
            sorted(self._reads),
        )
        all_ranks: list[Any] = allgather_object(tuple(own), name="elastic.progress")
        ranks = [_Progress(*each) for each in all_ranks]
        self._reads.update(*(rank.reads for rank in ranks))
        root = max(range(len(ranks)), key=lambda rank: ranks[rank].progress)
        saved = {rank: each.saved for rank, each in enumerate(ranks) if each.saved}
        parts, *_ = ranks[root].progress
        if parts != WHOLE and saved:
            _warn("all ranks go back to the last commit: no rank has all of a later state")
            self._go_back(*max(saved.items(), key=lambda item: item[1][0]))
        elif parts == PART:
            raise StateLostError(
                "the ranks that had the state of the training have died before others had taken "
                "all of it: start again from a checkpoint"
            )
        elif parts == NONE:
            self.sync()  # the first sync failed
        elif ranks[root].taken and ranks[root].is_at_saved_place:
            _warn(
                f"all ranks go back to the last commit: since then {_steps(ranks[root].taken)} "
                "taken, and the state shows the progress of none"
            )
            self._go_back(root, saved[root])
        else:
            self._follow(root, ranks)

    def _go_back(self, root: int, saved: tuple[tuple[int, int], dict[str, int]]) -> None:
        """Go on from the last commit of the root."""
        # Other ranks copy the root's state, and may share its memory; with local steps each rank
        # restores its own.
        if world.rank() == root or (self._parts == WHOLE and self._local_handlers):
            self.restore()
        (self._steps, self._changes), taken = saved
        self._copy_from(root, taken, models=True)
        self.save()

    def _follow(self, root: int, ranks: list[_Progress]) -> None:
        """Take the parts of the farthest rank's state that differ from this rank's."""
        theirs = ranks[root]
        _, steps, _, changes = theirs.progress
        some_are_behind = any(rank.progress[:2] != theirs.progress[:2] for rank in ranks)
        if some_are_behind and self._parts == WHOLE and self._steps != steps:
            self.save()  # to go back there, should the root die
        had_it = (self._parts, self._steps) == theirs.progress[:2]
        if theirs.taken:
            _warn(
                f"{_steps(theirs.taken)} taken already that the state does not show: the training "
                "repeats the batch without them. Let an attribute or a sampler change right "
                "after step(), before check_host_updates(), commit() and other collectives "
                "(docs/elastic.md)"
            )
        self._copy_from(root, theirs.taken, models=some_are_behind, had_it=had_it)
        self._steps, self._changes = steps, changes

    def _begin_at(self, taken: dict[str, int]) -> None:
        """Note that the function begins now, and that `taken` steps are done already."""
        self._taken, self._again, self._begun = dict(taken), dict(taken), []
        self._place = self._find_place()
        self._is_beginning = True

    def _copy_from(
        self, root: int, taken: dict[str, int], *, models: bool, had_it: bool = False
    ) -> None:
        """Take the root's attributes and samplers, and with `models` everything.

        The received state is compared with the root's before it counts; a rank that had the same
        model already skips the comparison. Such a rank receives the bits that it has, so its state
        stays whole: if the root dies meanwhile, the others take that rank's. With LocalSGD or
        DiLoCo a rank keeps the parameters and the optimizer of its own steps, even if a copy fails
        halfway.

        Args:
            root: the rank whose state is taken.
            taken: the steps of the beginning batch that are done already in its state.
            models: whether some ranks have other models.
            had_it: whether this rank has the root's model.
        """
        if taken:
            for handler in self._in_order():
                if handler in self._beginnings:
                    handler.rewind(copy.deepcopy(self._beginnings[handler]))
        local = self._local_handlers
        optimizers = [e for e in self._handlers.values() if isinstance(e, OptimizerStateHandler)]
        is_root = world.rank() == root
        keeps = bool(local) and self._parts == WHOLE
        had_it = had_it or (keeps and len(local) == len(optimizers))
        kept = [OptimizerCopy(each.value) for each in local] if keeps and models else []
        self._mix_if(models and not is_root and not had_it)
        try:
            for handler in self._in_order():
                if models or handler.is_small:
                    handler.copy_from(root)
            plain = broadcast_checked_object(self._values, root, "elastic.attributes")
            if models:
                self._require_undamaged(root, is_compared=not had_it or is_root)
            for own in kept:  # the root's hyper-parameters: they belong to its schedulers
                own.settings = settings_of(own.optimizer)
        finally:  # even if another rank has died meanwhile
            for own in kept:
                own.restore()
        for each in local:
            each.take_round(has_own=keeps or is_root, steps=self._steps, replaces=self._mix_if)
        self._values = plain
        self._parts = WHOLE
        if taken:
            self._note_beginnings()
        self._begin_at(taken)

    def _mix_if(self, takes_another: bool) -> None:
        """Note that this state has a part of another one, until the rest has come."""
        if takes_another:
            self._parts = PART

    @property
    def _local_handlers(self) -> list[LocalStepsHandler]:
        return [each for each in self._handlers.values() if isinstance(each, LocalStepsHandler)]

    def _require_undamaged(self, root: int, *, is_compared: bool) -> None:
        """Raise StateDamagedError on all ranks if one of them has not received the root's state."""
        things = [
            Thing(f"{name}: {part}", value)
            for name, handler in self._handlers.items()
            for part, value in handler.contents().items()
        ]
        damage = find_damage(root, things if is_compared else None, world.current.engine())
        if damage is not None:
            raise StateDamagedError(
                f"rank {world.rank()}: the state of rank {root} has not arrived as it was sent: "
                + describe_difference(damage)
            )

    def _in_order(self) -> list[StateHandler]:
        """Return the handlers; schedulers, which set an optimizer's rates, come after it."""
        return sorted(self._handlers.values(), key=lambda handler: handler.is_small)

    # --- the training's place, and the steps taken since it last changed

    def _find_place(self) -> dict[str, Any]:
        samplers = {name: value.state_dict() for name, value in self._samplers()}
        return {name: mark_of(value) for name, value in (self._values | samplers).items()}

    def _is_same(self, place: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Return whether two places are equal in all attributes and samplers that matter."""
        if place.keys() != other.keys():
            return False
        ignored = self._values.keys() - self._reads if self._reads else ()
        return all(place[name] == other[name] for name in place if name not in ignored)

    def _forget_known_steps(self) -> None:
        """Forget the counted steps if the place has changed: the state now includes them."""
        now = self._find_place()
        if self._is_same(now, self._place):
            return
        if any(self._again.values()):
            _warn(
                f"{_steps(self._again)} to be done again that had been taken already, and the "
                "state has changed before: it may show too little progress"
            )
        self._taken, self._again, self._place, self._beginnings = {}, {}, now, {}

    def _note_saved(self) -> None:
        at = self._steps, self._changes
        self._saved = _Saved(at, dict(self._taken), self._find_place(), dict(self._beginnings))

    def _is_at_saved_place(self) -> bool:
        """Return whether the last commit was made at this place, before any step."""
        saved = self._saved
        return saved is not None and not saved.taken and self._is_same(saved.place, self._place)

    def _note_beginnings(self) -> None:
        """Note the state at the beginning of a batch, for `StateHandler.rewind`."""
        handlers = self._handlers.values()
        if any(isinstance(handler, StatefulHandler) for handler in handlers):
            noted = {handler: handler.beginning() for handler in handlers}
            self._beginnings = {each: state for each, state in noted.items() if state is not None}

    def _samplers(self) -> list[tuple[str, Any]]:
        values = [(name, handler.value) for name, handler in self._handlers.items()]
        return [(n, v) for n, v in values if isinstance(v, Sampler) and hasattr(v, "state_dict")]

    def _count_steps_of(self, name: str, value: Any) -> None:
        if not isinstance(value, torch.optim.Optimizer):
            return

        def before_step(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            _require_averaged_gradients(value)
            if self._handlers[name].value is value:
                self._begin_step(name, value, [*args[1:], *kwargs.values()])

        def after_step(*_: Any) -> None:
            if self._handlers[name].value is value:
                self._end_step(name)

        hooks: Any = value
        self._last_hooks[name] = hooks, value.register_step_pre_hook(before_step).id
        hook = value.register_step_post_hook(after_step)
        # First, so that the step is counted even if a later hook fails in comparing the weights.
        hooks._optimizer_step_post_hooks.move_to_end(hook.id, last=False)

    def _begin_step(
        self, name: str, optimizer: torch.optim.Optimizer, arguments: Sequence[Any]
    ) -> None:
        """Note that a step begins; called twice if `step` calls the base class's `step`."""
        self._is_beginning = False
        self._forget_known_steps()
        if not self._taken:
            self._note_beginnings()
        is_taken = self._again.get(name, 0) > 0
        moves = any(map(callable, arguments)) and _moves_between_passes(optimizer)
        before = OptimizerCopy(optimizer) if is_taken or moves else None
        # If steps have been counted since one began, that one has ended with a program error.
        self._begun = [each for each in self._begun if each.steps == self._steps]
        self._begun.append(_BegunStep(name, self._steps, before, is_taken))

    def _end_step(self, name: str) -> None:
        begun = self._begun.pop() if self._begun and self._begun[-1].name == name else None
        if begun is not None and begun.is_taken and begun.before is not None:
            begun.before.restore()
            self._again[name] -= 1
            return
        self._steps += 1
        self._taken[name] = self._taken.get(name, 0) + 1
        self._place = self._find_place()  # a closure may have changed it
        if (handler := self._handlers[name]) in self._beginnings:
            self._beginnings[handler] = handler.beginning()

    def _undo_begun_steps(self) -> None:
        """Undo failed steps of which a copy was made; otherwise the state is no longer whole."""
        for begun in reversed(self._begun):
            if begun.steps == self._steps:
                if begun.before is not None:
                    begun.before.restore()
                elif has_moved(self._handlers[begun.name].value):
                    self._parts = NONE
        self._begun = []


def _moves_between_passes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step(closure)` may change parameters before it calls the closure.

    torch's optimizers call it once, first, except LBFGS.
    """
    module = getattr(type(optimizer), "_user_class", type(optimizer)).step.__module__
    return not module.startswith("torch.optim.") or module == "torch.optim.lbfgs"


def _steps(taken: Mapping[str, int]) -> str:
    """Return a text such as "2 steps of 'optimizer' were"."""
    parts = [f"{n} step{'s' if n != 1 else ''} of '{name}'" for name, n in taken.items() if n]
    return f"{' and '.join(parts)} {'was' if sum(taken.values()) == 1 else 'were'}"


def _warn(text: str) -> None:
    if world.rank() == 0:
        _log.warning(text)


def _require_averaged_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Wait for gradients on a device, and raise PeerLostError if a rank was lost meanwhile.

    The host does not wait for collectives on a device: a step enqueued after an aborted collective
    would use the unfinished gradients, and count as taken.
    """
    accelerator = torch.accelerator.current_accelerator()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    devices = {p.device for p in parameters if accelerator and p.device.type == accelerator.type}
    if not devices or not world.is_initialized():
        return
    for device in devices:
        torch.accelerator.synchronize(device)
    lost = world.current.world().process_sets.lost_ranks()
    if lost:
        raise PeerLostError(
            f"rank {world.rank()}: rank{'s' if len(lost) > 1 else ''} "
            f"{', '.join(map(str, lost))} died before the step of the optimizer"
        )
