# SPDX-License-Identifier: Apache-2.0
"""ScaledLR and WarmupLR: learning rates for many ranks, by torch's schedules or by our own."""

from __future__ import annotations

import math
import operator
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from torch_ring import world
from torch_ring.errors import NotInitializedError, ProcessSetLostError
from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["ScaledLR", "WarmupLR", "cosine_decay", "step_decay"]

Factor = Callable[[float], float]


class ScaledLR(LRScheduler):
    """Runs one process's schedule on any number of ranks: counts samples, and scales the rates.

    The optimizer's rates and the scheduler are those of a program on one rank, whose step takes a
    batch of `batch_size` samples. A step of n ranks takes n such batches, so it moves the schedule
    by n steps, and its rate is n times the schedule's (or `scale` of n)::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # right for one rank
        steps = epochs * math.ceil(len(dataset) / 32)  # as one rank takes them
        scheduler = ScaledLR(CosineAnnealingLR(optimizer, steps), batch_size=32)
        ...
        optimizer.step()
        scheduler.step(len(x))

    The number of ranks is read anew in each step, also after a death in elastic training. A state
    continues on any number of ranks: after the same samples the schedule is at the same place, with
    the rate for the new number. A call takes that many steps of `scheduler`, of some microseconds
    each.

    Each group of the optimizer notes the rate of one rank and its factor (``"one_rank_lr"``,
    ``"lr_scale"``), also in a state. A rate without that note is that of one rank: of an added
    group, or of a loaded state of a program without ScaledLR.

    Args:
        scheduler: any of torch's, on an optimizer whose rates are those of one rank. Several
            for one optimizer: in a ChainedScheduler or SequentialLR. A ReduceLROnPlateau counts
            evaluations: leave `batch_size` out, and give the value to ``step()``.
        batch_size: the samples for which `scheduler` takes one step. None: ``step()`` is one step
            of `scheduler`, whose steps are epochs or evaluations, and only the rates are scaled.
        scale: the factor of the rates, as a function of the number of ranks, such as ``math.sqrt``
            (often right for Adam), or ``lambda ranks: 1`` (Adasum, LocalSGD, DiLoCo, or a batch of
            all ranks together that stays the same). None: the number of ranks.
        process_set: the ranks that train this model together. None: those of the
            DistributedOptimizer, else all.

    Attributes:
        optimizer, scheduler, batch_size: as given.
        samples: the number of samples that all ranks together have trained on.

    Raises:
        TypeError: `scheduler` is none of torch's.
        ValueError: `batch_size` or a factor of `scale` is not positive, or the scheduler cannot be
            scaled: the message says why.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        batch_size: int | None = None,
        *,
        scale: Callable[[int], float] | None = None,
        process_set: ProcessSet | None = None,
    ) -> None:
        # Not LRScheduler.__init__(), which would set the optimizer's rates, as `scheduler` has.
        _require_scalable(scheduler, batch_size)
        if scale is not None and not callable(scale):
            raise ValueError(
                f"scale={scale!r} must be a function of the number of ranks, such as math.sqrt"
            )
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer
        self.batch_size, self.samples = batch_size, 0
        self._scaling = _Scaling(scale or float, process_set)
        self._scaling.apply(self.optimizer)
        self._scaling.hook(self.optimizer)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return another attribute of a scheduler, such as `last_epoch`, of `scheduler`."""
            if name == "_last_lr":
                return self.get_last_lr()
            if name == "scheduler" or name.startswith("__"):  # a copy does not have it yet
                raise AttributeError(name)
            return getattr(self.scheduler, name)

    def step(self, samples: Any = None) -> None:
        """Go on by one step of all ranks, after ``optimizer.step()``.

        Args:
            samples: the number that this rank has trained on since the last call, in all its
                backward passes. It must be the same on all ranks: samplers for training deal
                equally many to each. (After ``join()`` the counts may differ: load one rank's
                state on all.) None: `batch_size` in each of the optimizer's
                ``backward_passes_per_step``, also at the end of an epoch, where a batch may be
                smaller: then the schedule ends early. Passes in ``no_sync()`` are not counted: give
                the number. With a ReduceLROnPlateau: the value that it watches, the same on all
                ranks.

        Raises:
            ValueError: `samples` is no whole number, or negative, or is given though there is no
                `batch_size`.
        """
        groups = self.optimizer.param_groups
        _set_rates(groups, _rates_of_one(groups), 1.0)
        try:
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(samples)
            else:
                for _ in range(self._steps(samples)):
                    if _is_over(self.scheduler):  # samplers may repeat samples
                        break
                    self.scheduler.step()
        finally:
            self._scaling.apply(self.optimizer)

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rate of each group, with which the optimizer steps; tensors are copies."""
        self._scaling.apply(self.optimizer)
        rates = (group["lr"] for group in self.optimizer.param_groups)
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which fits any number of ranks."""
        # Elastic ranks compare the optimizer's rates with those of a rank that loads this.
        self._scaling.apply(self.optimizer)
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "rates": _rates_of_one(self.optimizer.param_groups),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the state's samples, with the optimizer's rates for this number of ranks.

        The optimizer's own state may be loaded before or after it.

        Args:
            state_dict: a result of ``state_dict()``, from any number of ranks.

        Raises:
            ValueError: the state is not from a ScaledLR, or has another `batch_size` or number of
                groups.
        """
        if "samples" not in state_dict or "scheduler" not in state_dict:
            raise ValueError(
                "this is not a state of ScaledLR: give one of a plain scheduler to the scheduler "
                "itself, and its optimizer's to the optimizer, if steps and rates are those of one "
                "rank"
            )
        if state_dict["batch_size"] != self.batch_size:
            raise ValueError(
                f"the state counts steps of batch_size={state_dict['batch_size']} samples, and "
                f"this schedule those of {self.batch_size}: give ScaledLR that of the state, and "
                "step() the number of a rank's samples"
            )
        rates, groups = state_dict["rates"], self.optimizer.param_groups
        if len(rates) != len(groups):
            raise ValueError(
                f"the state is of an optimizer with {len(rates)} groups of parameters, and this "
                f"one has {len(groups)}: add_param_group() first"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.samples = state_dict["samples"]
        _set_rates(groups, rates, 1.0)
        self._scaling.apply(self.optimizer)

    def _steps(self, samples: Any) -> int:
        """Count a step of all ranks; return the steps that the schedule takes for it."""
        if self.batch_size is None:
            if samples is not None:
                raise ValueError(
                    f"step({samples}) counts samples: give ScaledLR a batch_size, the samples for "
                    "which its scheduler takes one step"
                )
            return 1
        if samples is None:  # a DistributedOptimizer knows its passes
            samples = self.batch_size * getattr(self.optimizer, "backward_passes_per_step", 1)
        samples = _whole(samples, f"step({samples!r}): the number of samples")
        if samples < 0:
            raise ValueError(f"step({samples}): the number of samples must not be negative")
        before = self.samples // self.batch_size
        self.samples += samples * self._scaling.size(self.optimizer)
        return self.samples // self.batch_size - before


_ONE, _SCALE = "one_rank_lr", "lr_scale"  # in a group: of its "lr", which is their product
_SCALING = "_lr_scaling"  # an optimizer's, as _MARK; a DistributedOptimizer looks for both, too
_MARK = "_scaled_by"  # a WarmupLR, whose rates are those of the present ranks


class _Scaling:
    """Multiplies an optimizer's rates by a factor. Its hooks live as long as the optimizer."""

    def __init__(
        self, scale_of: Callable[[int], float], process_set: ProcessSet | None = None
    ) -> None:
        self._scale_of, self._process_set = scale_of, process_set
        self._last = 0.0  # there is none yet

    def hook(self, optimizer: Optimizer) -> None:
        """Let the rates follow the number of ranks, and states of other numbers."""
        vars(optimizer)[_SCALING] = self
        optimizer.register_step_pre_hook(lambda stepping, *_: self.apply(stepping))
        if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
            optimizer.register_load_state_dict_post_hook(self.apply)

    def size(self, optimizer: Optimizer) -> int:
        """Return the number of ranks."""
        own: ProcessSet = getattr(optimizer, "_process_set", global_process_set)  # once wrapped
        return (own if self._process_set is None else self._process_set).size()

    def apply(self, optimizer: Optimizer) -> None:
        """Set the rates for the present number of ranks."""
        try:
            size = self.size(optimizer)
        except (NotInitializedError, ProcessSetLostError):
            if not self._last:
                raise
            scale = self._last  # nobody can step with it; a state may be restored
        else:
            scale = float(self._scale_of(size))
            if not scale > 0:
                raise ValueError(f"scale({size}) is {scale}, and must be more than 0")
        self._last, groups = scale, optimizer.param_groups
        if any(group.get(_SCALE) != scale for group in groups):
            _set_rates(groups, _rates_of_one(groups), scale)


def _rates_of_one(groups: Sequence[dict[str, Any]]) -> list[float]:
    """Return each group's rate for one rank, with changes that the program has made since."""
    # A group that is added to others has their tensor, if the rate is one.
    notes = {id(g["lr"]): g for g in groups if _SCALE in g and isinstance(g["lr"], Tensor)}
    rates = []
    for group in groups:
        lr, note = group["lr"], notes.get(id(group["lr"]), group)
        rate = float(lr)
        if _SCALE in note:
            applied = note[_ONE] * note[_SCALE]
            if isinstance(lr, Tensor):
                applied = torch.tensor(applied, dtype=lr.dtype, device="cpu").item()
            rate = note[_ONE] if rate == applied else rate / note[_SCALE]
        rates.append(rate)
    return rates


def _set_rates(groups: Sequence[dict[str, Any]], rates: Sequence[float], scale: float) -> None:
    for group, rate in zip(groups, rates, strict=True):
        _set_rate(group, rate * scale)
        group[_ONE], group[_SCALE] = rate, scale


def _is_over(scheduler: LRScheduler) -> bool:
    """Return whether one more step would be too many for a OneCycleLR."""
    if isinstance(scheduler, ChainedScheduler):
        return any(map(_is_over, scheduler._schedulers))
    if isinstance(scheduler, SequentialLR):
        step = scheduler.last_epoch + 1
        active = scheduler._schedulers[bisect_right(scheduler._milestones, step)]
        return step not in scheduler._milestones and _is_over(active)
    return isinstance(scheduler, OneCycleLR) and scheduler.last_epoch >= scheduler.total_steps


def _whole(number: Any, name: str) -> int:
    try:
        if isinstance(number, bool):
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise ValueError(f"{name} must be a whole number") from None


def _require_scalable(scheduler: Any, batch_size: int | None) -> None:
    """Raise an error if `ScaledLR` cannot run `scheduler`."""
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            "ScaledLR wraps a scheduler of torch.optim.lr_scheduler, not "
            f"{type(scheduler).__name__}"
        )
    inner = getattr(scheduler, "_schedulers", ())
    for each in (scheduler, *inner):
        if isinstance(each, (ScaledLR, WarmupLR)):
            raise ValueError(f"{type(each).__name__} scales the rates itself: use it as it is")
    optimizer = scheduler.optimizer
    warmup = vars(optimizer).get(_MARK, lambda: None)()
    if warmup is not None:
        raise ValueError("a WarmupLR scales the rates of this optimizer already: use it as it is")
    if any(_SCALE in group for group in optimizer.param_groups):
        raise ValueError(
            "a ScaledLR scales the rates of this optimizer already, or did so in the state that it "
            "has loaded: make one ScaledLR, before you load states, and give it all schedules, in "
            "a ChainedScheduler or a SequentialLR"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"{type(optimizer).__name__} does not call Optimizer.__init__(), so its step() calls "
            "no hooks: give it to DistributedOptimizer first"
        )
    if batch_size is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau counts evaluations, not samples: leave batch_size out, and give "
            "the value to step()"
        )
    if _whole(batch_size, f"batch_size={batch_size!r}") < 1:
        raise ValueError(f"batch_size={batch_size} must be 1 or more")


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a group of parameters, in place if it is a tensor, as torch's schedulers."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class WarmupLR(LambdaLR):
    """Raises the learning rate from the optimizer's to `scale` times that, then lets it decay.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv:1706.02677). A step that
    averages over `size` batches may be `size` times as long, if the rate grows linearly during the
    first epochs, in which the weights change fast. During a warm-up of w epochs the rate is
    ``lr * (1 + (scale - 1) * epoch / w)``, afterwards it is ``lr * scale * after(epoch)``::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # right for one rank
        scheduler = WarmupLR(
            optimizer, warmup=5, after=step_decay([30, 60, 80]), steps_per_epoch=len(loader)
        )
        ...
        optimizer.step()
        scheduler.step()  # after each batch

    A state loaded on another number of ranks continues at the same epoch, with the rate for the
    new number.

    Args:
        optimizer: wrapped or not; its learning rates are those for one rank.
        warmup: length of the warm-up in epochs; 0: none.
        after: the decay factor as a function of the epochs since the beginning, such as
            :func:`step_decay` or :func:`cosine_decay`; None: no decay.
        steps_per_epoch: calls of ``step()`` in an epoch, not necessarily a whole number: usually
            ``len(loader)``, read before a :class:`torch_ring.data.ShardedSampler` loads its state,
            because afterwards it counts only the rest of the epoch. With 1, call ``step()`` once an
            epoch, or give `warmup` and `after` in steps, for any number of ranks.
        scale: the factor that the warm-up reaches; None: the number of ranks. Give another factor
            if a step averages over more batches (``backward_passes_per_step``), or if the rate must
            not grow linearly with the ranks (1 with Adasum; with Adam often their square root).
        last_epoch: as in torch's schedulers; it counts the calls of ``step()``.

    Raises:
        ValueError: `warmup` is negative, or `scale` or `steps_per_epoch` is not positive; or the
            optimizer has a ScaledLR.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float,
        after: Factor | None = None,
        *,
        steps_per_epoch: float = 1,
        scale: float | None = None,
        last_epoch: int = -1,
    ) -> None:
        # The arguments are not stored as attributes: state_dict() would carry them to another run.
        follows_ranks = scale is None
        scale = world.size() if scale is None else scale
        if warmup < 0 or not scale > 0 or not steps_per_epoch > 0:
            raise ValueError(
                f"warmup={warmup} must be 0 or more, scale={scale} and "
                f"steps_per_epoch={steps_per_epoch} more than 0"
            )
        if _SCALING in vars(optimizer):
            raise ValueError("a ScaledLR scales the rates of this optimizer already")
        self.steps_per_epoch = steps_per_epoch

        def factor(step: int) -> float:
            epoch = step / steps_per_epoch
            if epoch < warmup:
                return 1 + (scale - 1) * epoch / warmup
            return scale * (1.0 if after is None else after(epoch))

        super().__init__(optimizer, factor, last_epoch)
        if follows_ranks:
            vars(optimizer)[_MARK] = weakref.ref(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the state's epoch. Sets the optimizer's rates, so load that one first.

        Args:
            state_dict: a result of ``state_dict()``, from any number of ranks.
        """
        steps_per_epoch = self.steps_per_epoch
        super().load_state_dict(state_dict)
        self.last_epoch = round(self.last_epoch * steps_per_epoch / self.steps_per_epoch)
        self.steps_per_epoch = steps_per_epoch
        for group, base, factor in zip(
            self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True
        ):
            _set_rate(group, float(base) * factor(self.last_epoch))
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def step_decay(milestones: Sequence[float], gamma: float = 0.1) -> Factor:
    """Return a factor that is multiplied by `gamma` at each milestone.

    Args:
        milestones: ascending, in epochs since the beginning, or in the unit of `WarmupLR`.
        gamma: Goyal et al. 2017 use 0.1 at epochs 30, 60 and 80.

    Returns:
        A function from epochs to the factor, for ``WarmupLR(after=...)``.
    """
    return lambda epoch: gamma ** bisect_right(milestones, epoch)


def cosine_decay(begin: float, end: float, floor: float = 0.0) -> Factor:
    """Return a factor that falls from 1 to `floor` along half a cosine (arXiv:1608.03983).

    Args:
        begin: the epoch until which the factor is 1, such as the end of the warm-up.
        end: the epoch from which on the factor is `floor`, such as the end of the training.
        floor: the smallest factor, from 0 to 1.

    Returns:
        A function from epochs to the factor, for ``WarmupLR(after=...)``.

    Raises:
        ValueError: `end` is not after `begin`.
    """
    if not begin < end:
        raise ValueError(f"end={end} must be after begin={begin}")

    def factor(epoch: float) -> float:
        done = min(max((epoch - begin) / (end - begin), 0.0), 1.0)
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return factor
