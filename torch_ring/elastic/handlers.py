"""StateHandler: how a model, an optimizer or a sampler is saved, restored and synchronised."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from torch_ring.collectives.consistency import things_of
from torch_ring.collectives.objects import allgather_object, broadcast_checked_object
from torch_ring.elastic.sampler import ElasticSampler
from torch_ring.optimizer.adasum_optimizer import AdasumOptimizer
from torch_ring.optimizer.distributed_optimizer import follow_world
from torch_ring.state import broadcast_parameters, copy_optimizer_state
from torch_ring.world.process_set import global_process_set

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "get_handler_registry",
    "handler_of",
    "set_handler_registry",
]


class StateHandler(ABC):
    """Saves, restores and synchronises one value of a `TorchState`."""

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
        self.save()

    def save(self) -> None:
        """See `StateHandler`."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """See `StateHandler`."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

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


class SamplerStateHandler(StateHandler):
    """Handles an `ElasticSampler`: the progress of all ranks in the epoch."""

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
    return None
