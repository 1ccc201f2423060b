"""TorchState: models, optimizers, samplers and plain attributes of an elastic training."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from torch_ring import world
from torch_ring.collectives.consistency import Thing, find_damage
from torch_ring.collectives.objects import allgather_object, broadcast_checked_object
from torch_ring.elastic.handlers import (
    OptimizerCopy,
    StatefulHandler,
    StateHandler,
    get_handler_registry,
    handler_of,
    set_handler_registry,
)
from torch_ring.elastic.object_state import ObjectState, require_plain
from torch_ring.errors import PeerLostError, RingError, StateDamagedError

__all__ = [
    "StateHandler",
    "StateLostError",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

_log = logging.getLogger("torch_ring")

_MOST_MARK_BYTES = 1 << 16  # of an attribute that is looked at in each step


class StateLostError(RingError):
    """All ranks that had the state have died, and others have a part of it only."""


class _Saved(NamedTuple):
    """What is known of a whole saved state."""

    at: tuple[int, int]  # steps and changes
    taken: dict[str, int]
    place: dict[str, Any]


class _BegunStep(NamedTuple):
    """A step of an optimizer that has begun."""

    name: str  # of the optimizer
    steps: int  # that had been taken by then
    before: OptimizerCopy | None  # what to go back to, if it was copied
    is_taken: bool  # it has been taken already, and is to change nothing


class _Told(NamedTuple):
    """What a rank tells the others of its state."""

    progress: tuple[bool, int, int, int]  # whole; steps; less those the state does not say; changes
    taken: dict[str, int]
    is_at_saved_place: bool
    saved: tuple[tuple[int, int], dict[str, int]] | None
    is_mixed: bool
    reads: list[str]


class TorchState(ObjectState):
    """The state of a training with torch, for `run`.

    After a death the survivors usually copy nothing. Gradients are averaged before ``step()``, so a
    failed pass leaves parameters and optimizer as they were before it, and the survivors go on with
    that step. Where some have taken it already, the others take their state. So at most one step is
    lost, whenever the last `commit` was.

    The training begins again at its place: where the attributes say that the function reads before
    its first step (all of them, if it reads none), and the samplers. Steps that were taken since
    the place last changed, of one or several optimizers, are not taken twice: either all ranks go
    back to the last commit, if that was made at this place, or the function does them again, and
    ``step()`` leaves parameters and optimizer as they are. docs/elastic.md says what that loses.

    Args:
        model: a module, or None.
        optimizer: an optimizer, wrapped or not, or None.
        **kwargs: other modules, optimizers and ElasticSamplers; schedulers and others with
            ``state_dict()`` and ``load_state_dict()``; and plain attributes, which must be
            picklable.

    Raises:
        ValueError: an attribute holds a module or an optimizer, of which it would keep a copy; or
            an optimizer has ``op=Adasum``.
    """

    _is_beginning = False  # the function is called, and has taken no step

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
        self._saved: _Saved | None = None  # a whole state
        self._taken: dict[str, int] = {}  # steps of each optimizer since the place changed
        self._again: dict[str, int] = {}  # those of them that the function is still to do again
        self._begun: list[_BegunStep] = []  # that have not ended
        self._last_hooks: dict[str, tuple[Any, int]] = {}  # of optimizers, before their steps
        self._place: dict[str, Any] = {}  # at the last step: of each attribute and sampler
        self._reads: set[str] = set()  # attributes that the function has read before a first step
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

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name[0] != "_" and self._is_beginning and name in self._saved_state:
            self._reads.add(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
            self._count_steps_of(name, value)
        elif name in self.__dict__.get("_saved_state", {}):
            require_plain(name, value)
            self._changes += 1
        object.__setattr__(self, name, value)

    def save(self) -> None:
        """See `State`."""
        self._look()
        for handler in self._handlers.values():
            handler.save()
        super().save()
        if self._is_whole:
            self._note_saved()

    def restore(self) -> None:
        """See `State`."""
        for handler in self._in_order():
            handler.restore()
        super().restore()
        self._begin_at(self._saved.taken if self._saved is not None else {})

    def sync(self) -> None:
        """See `State`."""
        for optimizer, hook in self._last_hooks.values():  # what fails before it has moved nothing
            optimizer._optimizer_step_pre_hooks.move_to_end(hook)
        self._is_whole = False
        for handler in self._in_order():
            handler.sync()
        super().sync()
        self._is_whole = True
        self._begin_at({})
        self._note_saved()

    def reset(self) -> None:
        """See `State`."""
        for handler in self._handlers.values():
            handler.reset()

    def on_arrival(self) -> None:
        """See `State`."""
        self._is_whole, self._saved = False, None

    def on_reset(self) -> None:
        """See `State`. What the callbacks change is no other place."""
        self._is_beginning = False
        super().on_reset()
        self._place = self._find_place()
        self._is_beginning = True

    def resume(self) -> None:
        """Go on from where the farthest rank is, or from the last commit. Collective.

        Only a rank whose state is whole counts: one that has come, or that a failure has kept from
        taking a whole state, has none. If there is none at all, what one has saved before counts.

        Raises:
            StateLostError: on all ranks: there is a part of a state only.
        """
        self._is_beginning = False
        self._undo_begun_steps()
        self._look()
        if not self._place:  # nothing says where the training is, so nothing is done again
            self._taken = {}
        own = _Told(
            (self._is_whole, self._steps, -sum(self._taken.values()), self._changes),
            self._taken,
            self._is_at_saved_place(),
            None if self._saved is None else self._saved[:2],
            self._is_mixed,
            sorted(self._reads),
        )
        ranks = [_Told(*each) for each in allgather_object(tuple(own), name="elastic.progress")]
        farthest = max(rank.progress for rank in ranks)
        root = [rank.progress for rank in ranks].index(farthest)
        self._reads.update(*(rank.reads for rank in ranks))
        is_whole, *_ = farthest
        if not is_whole:
            self._begin_again([rank.saved for rank in ranks], any(r.is_mixed for r in ranks))
        elif ranks[root].taken and ranks[root].is_at_saved_place:
            self._go_back(root, ranks[root])
        else:
            self._follow(root, ranks)

    def _begin_again(
        self, saved: list[tuple[tuple[int, int], dict[str, int]] | None], some_are_mixed: bool
    ) -> None:
        """Go on from the farthest saved state; without one, as at the start."""
        there = [each[0] for each in saved if each is not None]
        if there:
            root = [each and each[0] for each in saved].index(max(there))
            _warn("all ranks go back to the last commit: no rank has all of a later state")
            found = saved[root]
            assert found is not None
            (self._steps, self._changes), taken = found
            if world.rank() == root:
                self.restore()
            self._copy_place_from(root, taken, models=True)
            self.save()
        elif some_are_mixed:
            raise StateLostError(
                "the ranks that had the state of the training have died before others had taken "
                "all of it: start again from a checkpoint"
            )
        else:
            self.sync()  # the first sync failed

    def _go_back(self, root: int, told: _Told) -> None:
        """Go on from the last commit of a rank, which was made at the place where it is."""
        _warn(
            f"all ranks go back to the last commit: since then {_steps(told.taken)} taken, and the "
            "state says of no step how far the training is"
        )
        if self._is_whole:
            self.restore()
        self._copy_from(root, models=True)
        _, self._steps, _, self._changes = told.progress
        self._begin_at({})
        self.save()

    def _follow(self, root: int, ranks: list[_Told]) -> None:
        """Take the state of the rank that is farthest, as far as this one's is another."""
        told = ranks[root]
        _, steps, _, changes = told.progress
        some_are_behind = any(rank.progress[:2] != told.progress[:2] for rank in ranks)
        if some_are_behind and self._is_whole and self._steps != steps:
            self.save()  # to go back there, should the root die
        is_behind = (self._is_whole, self._steps) != told.progress[:2]
        if told.taken:
            _warn(
                f"{_steps(told.taken)} taken already that the state does not say: the training "
                "does the batch again without them. Let an attribute or a sampler say so right "
                "after step(), before check_host_updates(), commit() and other collectives "
                "(docs/elastic.md)"
            )
        self._copy_place_from(root, told.taken, models=some_are_behind, had_it=not is_behind)
        self._steps, self._changes = steps, changes

    def _copy_place_from(
        self, root: int, taken: dict[str, int], *, models: bool, had_it: bool = False
    ) -> None:
        """Take the root's state, in which `taken` steps are taken of the batch that begins."""
        if taken:
            for handler in self._in_order():
                handler.rewind()
        self._copy_from(root, models=models, had_it=had_it)
        if taken:
            self._note_beginning()
        self._begin_at(taken)

    def _begin_at(self, taken: dict[str, int]) -> None:
        """Note that the function begins now, where `taken` steps have been taken already."""
        self._taken, self._again, self._begun = dict(taken), dict(taken), []
        self._place = self._find_place()
        self._is_beginning = True

    def _copy_from(self, root: int, *, models: bool, had_it: bool = False) -> None:
        """Take attributes and samplers of the root's, and with `models` everything.

        What has come is compared with what the root has, before it counts. A rank that had the same
        model already is spared the time. It gets the bits that it has, so its state stays whole: if
        the root dies meanwhile, the others take that rank's.
        """
        takes_another = models and world.rank() != root and not had_it
        self._is_whole = self._is_whole and not takes_another
        self._is_mixed = self._is_mixed or takes_another
        for handler in self._in_order():
            if models or handler.is_small:
                handler.copy_from(root)
        plain = {name: self.__dict__[name] for name in self._saved_state}
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

    def _in_order(self) -> list[StateHandler]:
        """Return the handlers; what sets the rates of an optimizer comes after that."""
        return sorted(self._handlers.values(), key=lambda handler: handler.is_small)

    # --- the place where the training is, and the steps that it does not tell of

    def _find_place(self) -> dict[str, Any]:
        place = {name: _mark_of(self.__dict__[name]) for name in self._saved_state}
        return place | {name: _mark_of(value.state_dict()) for name, value in self._samplers()}

    def _is_same(self, place: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Return whether the function begins alike at two places, as far as is known."""
        if place.keys() != other.keys():
            return False
        ignored = self._saved_state.keys() - self._reads if self._reads else ()
        return all(place[name] == other[name] for name in place if name not in ignored)

    def _look(self) -> None:
        """Forget the steps that the state tells of by now."""
        now = self._find_place()
        if self._is_same(now, self._place):
            return
        if any(self._again.values()):
            _warn(
                f"{_steps(self._again)} to be done again that had been taken already, and the "
                "state has changed before: it may say less than what was done"
            )
        self._taken, self._again, self._place = {}, {}, now
        for handler in self._handlers.values():
            handler.forget_beginning()

    def _note_saved(self) -> None:
        self._saved = _Saved((self._steps, self._changes), dict(self._taken), self._find_place())

    def _is_at_saved_place(self) -> bool:
        """Return whether the last commit was made here, before any step from here."""
        saved = self._saved
        return saved is not None and not saved.taken and self._is_same(saved.place, self._place)

    @property
    def _has_stateful(self) -> bool:
        return any(isinstance(handler, StatefulHandler) for handler in self._handlers.values())

    def _note_beginning(self) -> None:
        if self._has_stateful:
            for handler in self._handlers.values():
                handler.note_beginning()

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
        # First: a hook that compares the ranks' weights, and fails, comes after the step.
        hooks._optimizer_step_post_hooks.move_to_end(hook.id, last=False)

    def _begin_step(
        self, name: str, optimizer: torch.optim.Optimizer, arguments: Sequence[Any]
    ) -> None:
        """Note that a step begins; called twice for one step if a `step` calls its base class's."""
        self._is_beginning = False
        self._look()
        if not self._taken:
            self._note_beginning()
        is_taken = self._again.get(name, 0) > 0
        moves = any(map(callable, arguments)) and _moves_between_passes(optimizer)
        before = OptimizerCopy(optimizer) if is_taken or moves else None
        # Those of which others have counted steps since have ended, by an error of the program.
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
        self._place = self._find_place()  # which a closure may have changed
        if self._has_stateful:
            self._handlers[name].note_step()

    def _undo_begun_steps(self) -> None:
        """Take back what a step has done that has failed; without a copy nobody can."""
        for begun in reversed(self._begun):
            if begun.steps == self._steps:
                if begun.before is not None:
                    begun.before.restore()
                else:
                    self._is_whole = False
        self._begun = []


def _mark_of(value: Any) -> Any:
    """Return something that is another one when the value is, also if it changes in place.

    Of something large only the length counts.
    """
    if value is None or isinstance(value, (int, float, complex, str, bytes)):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    pickled = _Bounded()
    try:
        pickle.Pickler(pickled, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # any, of the value's own
        return id(value), len(value) if isinstance(value, Sized) else 0
    return bytes(pickled.content)


class _Bounded:
    """A file that takes little."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: bytes) -> int:
        self.content += data
        if len(self.content) > _MOST_MARK_BYTES:
            raise OverflowError
        return len(data)


def _moves_between_passes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step(closure)` may change parameters, and then call the closure.

    Those of torch call it once, first, but for LBFGS.
    """
    module = type(optimizer).step.__module__
    return not module.startswith("torch.optim.") or module == "torch.optim.lbfgs"


def _steps(taken: Mapping[str, int]) -> str:
    """Return "2 steps of 'optimizer' were", say."""
    parts = [f"{n} step{'s' if n != 1 else ''} of '{name}'" for name, n in taken.items() if n]
    return f"{' and '.join(parts)} {'was' if sum(taken.values()) == 1 else 'were'}"


def _warn(text: str) -> None:
    if world.rank() == 0:
        _log.warning(text)


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
