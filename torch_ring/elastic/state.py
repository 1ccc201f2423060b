"""TorchState: models, optimizers, samplers and plain attributes of an elastic training."""

from __future__ import annotations

import logging
from typing import Any

import torch

from torch_ring import world
from torch_ring.collectives.consistency import Thing, find_damage
from torch_ring.collectives.objects import allgather_object, broadcast_checked_object
from torch_ring.elastic.handlers import (
    StateHandler,
    get_handler_registry,
    handler_of,
    set_handler_registry,
)
from torch_ring.elastic.object_state import ObjectState
from torch_ring.elastic.sampler import ElasticSampler
from torch_ring.errors import PeerLostError, RingError, StateDamagedError

__all__ = [
    "StateHandler",
    "StateLostError",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

_log = logging.getLogger("torch_ring")


class StateLostError(RingError):
    """All ranks that had the state have died, and others have a part of it only."""


class TorchState(ObjectState):
    """The state of a training with torch, for `run`.

    After a death the survivors usually copy nothing. Gradients are averaged before ``step()``, so a
    failed pass leaves parameters and optimizer as they were before it, and the survivors go on with
    that step. Where some have taken it already, the others take their state. So at most one step is
    lost, whenever the last `commit` was.

    That needs to know how far the training is: plain attributes that change, or an ElasticSampler
    that records a batch, with every step, as in Horovod's examples. If they change only at commits,
    all ranks go back to the last commit, as in Horovod.

    Args:
        model: a module, or None.
        optimizer: an optimizer, wrapped or not, or None.
        **kwargs: other modules, optimizers and ElasticSamplers, and plain attributes, which must be
            picklable.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._changes = 0  # of plain attributes
        self._steps = 0  # taken by all optimizers
        self._is_whole = False  # nothing of another state is mixed into this one
        self._is_mixed = False  # a part of another state is, and the rest has not come
        self._saved_at: tuple[int, int] | None = None  # steps and changes of a whole saved state
        self._progress_at_step: dict[str, Any] = {}  # of each optimizer: at its last step
        self._several_steps = False  # an optimizer has taken two, or more
        self._commits_only = False  # ... between which no attribute and no sampler changed
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = handler_of(value)
            if handler is not None:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
                self._count_steps_of(name, value)
            elif name in kwargs or value is not None:
                plain[name] = value
        super().__init__(**plain)

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
            self._count_steps_of(name, value)
        elif name in self.__dict__.get("_saved_state", {}):
            self._changes += 1
        object.__setattr__(self, name, value)

    def save(self) -> None:
        """See `State`."""
        for handler in self._handlers.values():
            handler.save()
        super().save()
        if self._is_whole:
            self._saved_at = (self._steps, self._changes)

    def restore(self) -> None:
        """See `State`."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """See `State`."""
        self._is_whole = False
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        self._is_whole = True
        self._saved_at = (self._steps, self._changes)

    def reset(self) -> None:
        """See `State`."""
        for handler in self._handlers.values():
            handler.reset()

    def on_arrival(self) -> None:
        """See `State`."""
        self._is_whole, self._saved_at = False, None

    def resume(self) -> None:
        """Go on from where the farthest rank is, or from the last commit. Collective.

        Only a rank whose state is whole counts: one that has come, or that a failure has kept from
        taking a whole state, has none. If there is none at all, what one has saved before counts.

        Raises:
            StateLostError: on all ranks: there is a part of a state only.
        """
        own = (self._is_whole, self._steps, self._changes, self._is_live())
        saved = (self._saved_at, self._is_mixed)
        both = allgather_object((own, saved), name="elastic.progress")
        ranks = [own for own, _ in both]
        if not any(is_whole for is_whole, *_ in ranks):
            self._begin_again([saved_at for _, (saved_at, _) in both], any(m for _, (_, m) in both))
        elif any(is_whole and not is_live for is_whole, _, _, is_live in ranks):
            self._go_back(ranks)
        else:
            self._follow([(whole, steps, changes) for whole, steps, changes, _ in ranks])
        self._progress_at_step.clear()

    def _begin_again(self, saved_at: list[tuple[int, int] | None], some_are_mixed: bool) -> None:
        """Go on from the farthest saved state; without one, as at the start."""
        there = [at for at in saved_at if at is not None]
        if there:
            root = saved_at.index(max(there))
            if world.rank() == root:
                self.restore()
            self._copy_from(root, models=True)
            self._steps, self._changes = max(there)
            self.save()
        elif some_are_mixed:
            raise StateLostError(
                "the ranks that had the state of the training have died before others had taken "
                "all of it: start again from a checkpoint"
            )
        else:
            self.sync()  # the first sync failed

    def _go_back(self, ranks: list[tuple[bool, int, int, bool]]) -> None:
        """Go on from the last commit of the first rank that has one."""
        if world.rank() == 0:
            _log.warning("all ranks go back to the last commit: the state changes at commits only")
        root = [is_whole for is_whole, *_ in ranks].index(True)
        if self._is_whole:
            self.restore()
        self._copy_from(root, models=True)
        self.save()
        _, self._steps, self._changes, _ = ranks[root]

    def _follow(self, ranks: list[tuple[bool, int, int]]) -> None:
        """Take the state of the rank that is farthest, as far as this one's is another."""
        farthest = max(ranks)
        _, steps, changes = farthest
        some_are_behind = any(rank[:2] != farthest[:2] for rank in ranks)
        if some_are_behind and self._is_whole and self._steps != steps:
            self.save()  # to go back there, should the root die
        is_behind = (self._is_whole, self._steps) != farthest[:2]
        self._copy_from(ranks.index(farthest), models=some_are_behind, had_it=not is_behind)
        self._steps, self._changes = steps, changes

    def _copy_from(self, root: int, *, models: bool, had_it: bool = False) -> None:
        """Take attributes and samplers of the root's, and with `models` everything.

        What has come is compared with what the root has, before it counts. A rank that had the same
        model already is spared the time. It gets the bits that it has, so its state stays whole: if
        the root dies meanwhile, the others take that rank's.
        """
        takes_another = models and world.rank() != root and not had_it
        self._is_whole = self._is_whole and not takes_another
        self._is_mixed = self._is_mixed or takes_another
        for handler in self._handlers.values():
            if models or isinstance(handler.value, ElasticSampler):
                handler.copy_from(root)
        plain = {name: getattr(self, name) for name in self._saved_state}
        plain = broadcast_checked_object(plain, root, "elastic.attributes")
        if models:
            self._require_undamaged(root, is_compared=not had_it or world.rank() == root)
        if world.rank() != root:
            for name, value in plain.items():
                setattr(self, name, value)
        self._is_whole, self._is_mixed = True, False

    def _require_undamaged(self, root: int, *, is_compared: bool) -> None:
        """Raise StateDamagedError on all ranks if one of them has not got what the root has."""
        things = [
            Thing(f"{name}: {part}", value)
            for name, handler in self._handlers.items()
            for part, value in handler.contents().items()
        ]
        damage = find_damage(root, things if is_compared else None, world.current.engine())
        if damage:
            raise StateDamagedError(
                f"rank {world.rank()}: the state of rank {root} has not arrived as it was sent: "
                + damage
            )

    def _is_live(self) -> bool:
        """Return whether the attributes and samplers say how far the training is."""
        if self._commits_only:
            return not (self._saved_state or self._samplers())
        now = self._progress()
        return self._several_steps or all(now != at for at in self._progress_at_step.values())

    def _progress(self) -> Any:
        return self._changes, [(each.epoch, each.processed_num) for each in self._samplers()]

    def _samplers(self) -> list[ElasticSampler]:
        values = [handler.value for handler in self._handlers.values()]
        return [value for value in values if isinstance(value, ElasticSampler)]

    def _count_steps_of(self, name: str, value: Any) -> None:
        if not isinstance(value, torch.optim.Optimizer):
            return

        def after_step(*_: Any) -> None:
            if self._handlers[name].value is not value:
                return
            self._steps += 1
            before, now = self._progress_at_step.get(name), self._progress()
            self._several_steps |= before is not None
            self._commits_only |= before == now
            self._progress_at_step[name] = now

        value.register_step_pre_hook(_require_averaged_gradients)
        value.register_step_post_hook(after_step)


def _require_averaged_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Wait for gradients on a device, and raise PeerLostError if a rank was lost meanwhile.

    The host does not wait for collectives on a device: a step that is enqueued behind one which is
    aborted would take what is there, and count as taken.
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
