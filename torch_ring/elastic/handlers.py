"""StateHandler: how a model, an optimizer or a sampler is saved, restored and synchronised."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torch_ring.collectives.consistency import things_of
from torch_ring.collectives.objects import allgather_object, broadcast_checked_object
from torch_ring.elastic.sampler import ElasticSampler
from torch_ring.optimizer.adasum_optimizer import AdasumOptimizer
from torch_ring.optimizer.distributed_optimizer import follow_world
from torch_ring.state import broadcast_parameters, copy_optimizer_state
from torch_ring.world import current
from torch_ring.world.process_set import global_process_set

__all__ = [
    "ModelStateHandler",
    "OptimizerCopy",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "StatefulHandler",
    "get_handler_registry",
    "handler_of",
    "set_handler_registry",
]

_MOST_BYTES_A_BATCH = 1 << 20  # of tensors that are copied in each batch


class StateHandler(ABC):
    """Saves, restores and synchronises one value of a `TorchState`."""

    is_small = False  # whether ranks that have the same steps take the root's, too

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Handle another value, and save it."""
        self.value = value
        self.save()

    @abstractmethod
    def save(self) -> None:
        """Keep the present state of the value."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what was saved last."""

    @abstractmethod
    def copy_from(self, root: int) -> None:
        """Give all ranks the present state of the root's value. Collective."""

    def contents(self) -> Mapping[str, Any]:
        """Return what `copy_from` has given, to be compared with the root's: nothing by default.

        Returns:
            Tensors, numbers and texts by name. They are the same on all ranks, but for names that
            the root has not.
        """
        return {}

    def sync(self) -> None:
        """Give all ranks the state of rank 0's value, and save it. Collective."""
        self.copy_from(0)
        self.save()

    def reset(self) -> None:  # noqa: B027  most need nothing
        """Adapt the value to a new world. Collective."""

    def note_beginning(self) -> None:  # noqa: B027  most need nothing
        """Note the present state, before the first step of a batch, for `rewind`."""

    def note_step(self) -> None:  # noqa: B027  most need nothing
        """Note that the value, an optimizer, has just taken a step."""

    def rewind(self) -> None:  # noqa: B027  most need nothing
        """Go back to the beginning of the batch, of which steps that were taken stay."""

    def forget_beginning(self) -> None:  # noqa: B027  most need nothing
        """Forget what was noted: the batch is over."""


class ModelStateHandler(StateHandler):
    """Handles a module: its parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        """See `StateHandler`."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """See `StateHandler`."""
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
        if isinstance(optimizer, AdasumOptimizer):  # takes a step of its own before it fails
            raise ValueError("elastic training does not go with op=Adasum")
        super().__init__(optimizer)
        self._settings: list[dict[str, Any]] | None = None  # after its last step of the batch
        self.save()

    def save(self) -> None:
        """See `StateHandler`."""
        self._saved, self._saved_settings = copy.deepcopy(self.value.state_dict()), self._settings

    def restore(self) -> None:
        """See `StateHandler`."""
        self.value.load_state_dict(copy.deepcopy(self._saved))
        self._settings = self._saved_settings

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

    def note_beginning(self) -> None:
        """See `StateHandler`."""
        self._settings = settings_of(self.value)

    note_step = note_beginning

    def rewind(self) -> None:
        """See `StateHandler`. Takes back what a scheduler has set since the last step."""
        if self._settings is not None:
            set_settings(self.value, copy.deepcopy(self._settings))

    def forget_beginning(self) -> None:
        """See `StateHandler`."""
        self._settings = None


class OptimizerCopy:
    """An optimizer and its parameters at one moment."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = [(parameter, parameter.detach().clone()) for parameter in parameters]
        self._settings = settings_of(optimizer)
        # As it is: load_state_dict() would cast it to the parameters' dtypes.
        self._state = copy.deepcopy(dict(optimizer.state), {id(p): p for p in parameters})

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to that moment; once."""
        for parameter, value in self._parameters:
            parameter.copy_(value)
        set_settings(self._optimizer, self._settings)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the hyper-parameters of each group."""
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def set_settings(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """Give the groups these hyper-parameters, and no others; to each group that had some then."""
    for group, values in zip(optimizer.param_groups, settings, strict=False):
        for key in group.keys() - values.keys() - {"params"}:
            del group[key]
        group.update(values)


class SamplerStateHandler(StateHandler):
    """Handles an `ElasticSampler`: the progress of all ranks in the epoch."""

    is_small = True

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        """See `StateHandler`."""
        self._saved = dict(self.value.state_dict())

    def restore(self) -> None:
        """See `StateHandler`."""
        self.value.load_state_dict(self._saved)

    def copy_from(self, root: int) -> None:
        """See `StateHandler`."""
        self.value.load_state_dict(
            broadcast_checked_object(self.value.state_dict(), root, "elastic.sampler")
        )

    def sync(self) -> None:
        """Give all ranks the farthest progress of any of them, and save it. Collective."""
        states = allgather_object(self.value.state_dict())
        farthest = max(states, key=lambda state: (state["epoch"], state["processed_num"]))
        self.value.load_state_dict(farthest)
        self.save()

    def reset(self) -> None:
        """See `StateHandler`."""
        self.value.reset()


class StatefulHandler(StateHandler):
    """Handles what has ``state_dict()`` and ``load_state_dict()``: a scheduler, say.

    It stays the program's object, which may hold the optimizer or the model.
    """

    is_small = True

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._beginning: Any = None  # of the batch
        self.save()

    def save(self) -> None:
        """See `StateHandler`."""
        self._saved, self._saved_beginning = copy.deepcopy(self.value.state_dict()), self._beginning
        tensors = [t for t in tree_leaves(self._saved) if isinstance(t, torch.Tensor)]
        self._is_large = sum(t.nbytes for t in tensors) > _MOST_BYTES_A_BATCH

    def restore(self) -> None:
        """See `StateHandler`."""
        self.value.load_state_dict(copy.deepcopy(self._saved))
        self._beginning = self._saved_beginning

    def copy_from(self, root: int) -> None:
        """See `StateHandler`."""
        state = broadcast_checked_object(self.value.state_dict(), root, "elastic.stateful")
        if current.rank() != root:
            self.value.load_state_dict(state)

    def note_beginning(self) -> None:
        """See `StateHandler`. Something large is not copied, and not taken back."""
        if not self._is_large:
            self._beginning = copy.deepcopy(self.value.state_dict())

    def rewind(self) -> None:
        """See `StateHandler`."""
        if self._beginning is not None:
            self.value.load_state_dict(copy.deepcopy(self._beginning))

    def forget_beginning(self) -> None:
        """See `StateHandler`."""
        self._beginning = None


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the pairs of a type and the handler of its instances; the first that fits is used."""
    return list(_registry)


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Use other handlers, for states that are made from now on."""
    _registry[:] = registry


def handler_of(value: Any) -> StateHandler | None:
    """Return a handler of a value; None: it is a plain attribute."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    methods = [getattr(value, name, None) for name in ("state_dict", "load_state_dict")]
    if all(map(callable, methods)) and not isinstance(value, type):
        return StatefulHandler(value)
    return None
