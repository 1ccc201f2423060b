# SPDX-License-Identifier: Apache-2.0
"""ScaledLR and WarmupLR: learning rates for many ranks, by torch's schedules or by our own."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

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

    Args:
        scheduler: any of torch's, fresh, on an optimizer whose rates are those of one rank. Several
            for one optimizer: in a ChainedScheduler or SequentialLR. A ReduceLROnPlateau counts
            evaluations: leave `batch_size` out, and give the value to ``step()``.
        batch_size: the samples for which `scheduler` takes one step. None: ``step()`` is one step
            of `scheduler`, whose steps are epochs or evaluations, and only the rates are scaled.
        scale: the factor of the rates, as a function of the number of ranks, such as ``math.sqrt``
            (often right for Adam), or ``lambda ranks: 1`` (Adasum, LocalSGD, DiLoCo, or a batch of
            all ranks together that stays the same). None: the number of ranks.
        process_set: the ranks that train this model together; by default all.

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
        process_set: ProcessSet = global_process_set,
    ) -> None:
        # Not LRScheduler.__init__(), which would set the optimizer's rates, as `scheduler` has.
        _require_scalable(scheduler, batch_size)
        if scale is not None and not callable(scale):
            raise ValueError(
                f"scale={scale!r} must be a function of the number of ranks, such as math.sqrt"
            )
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer
        self.batch_size, self.samples = batch_size, 0
        self._scale_of, self._process_set = scale or float, process_set
        self._scale = 0.0  # there is none yet
        self._scale = self._scale_now()
        self._rates = _rates_of(self.optimizer)
        self._set_rates()
        _mark(self.optimizer, self)
        this = weakref.WeakMethod(self._set_rates_anew)
        self.optimizer.register_load_state_dict_post_hook(lambda _: _call(this, always=True))
        self.optimizer.register_step_pre_hook(lambda *_: _call(this, always=False))

    def step(self, samples: Any = None) -> None:
        """Go on by one step of all ranks, after ``optimizer.step()``.

        Args:
            samples: the number that this rank has trained on since the last call, in all its
                backward passes. It must be the same on all ranks: samplers for training deal
                equally many to each. None: `batch_size` in each pass, also at the end of an epoch,
                where a batch may be smaller: then the schedule ends early. With a
                ReduceLROnPlateau: the value that it watches, the same on all ranks.

        Raises:
            ValueError: `samples` is negative, or is given though there is no `batch_size`.
        """
        self._rates = self._unscaled()
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
            _set_rate(group, rate)
        try:
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(samples)
            else:
                for _ in range(self._steps(samples)):
                    self.scheduler.step()
            self._rates = _rates_of(self.optimizer)
        finally:
            self._scale = self._scale_now()
            self._set_rates()

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rate of each group, with which the optimizer steps."""
        self._set_rates_anew(always=False)
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which fits any number of ranks."""
        # Elastic ranks compare the optimizer's rates with those of a rank that loads this.
        self._set_rates_anew(always=False)
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "rates": self._unscaled(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the state's samples, with the optimizer's rates for this number of ranks.

        The optimizer's own state may be loaded before or after it.

        Args:
            state_dict: a result of ``state_dict()``, from any number of ranks.

        Raises:
            ValueError: the state is not from a ScaledLR, or has another `batch_size`.
        """
        if "samples" not in state_dict or "scheduler" not in state_dict:
            raise ValueError(
                "this is not a state of ScaledLR: give one of a plain scheduler to the scheduler "
                "itself, before ScaledLR wraps it, if its steps are those of one rank"
            )
        if state_dict["batch_size"] != self.batch_size:
            raise ValueError(
                f"the state counts steps of batch_size={state_dict['batch_size']} samples, and "
                f"this schedule those of {self.batch_size}: give ScaledLR that of the state, and "
                "step() the number of a rank's samples"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.samples = state_dict["samples"]
        self._rates = list(state_dict["rates"])
        self._set_rates_anew(always=True)

    def _steps(self, samples: int | None) -> int:
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
        if samples < 0:
            raise ValueError(f"step({samples}): the number of samples must not be negative")
        before = self.samples // self.batch_size
        self.samples += int(samples) * self._process_set.size()
        steps = self.samples // self.batch_size - before
        if isinstance(self.scheduler, OneCycleLR):  # samplers may repeat samples: no step too many
            steps = min(steps, self.scheduler.total_steps - self.scheduler.last_epoch)
        return steps

    def _scale_now(self) -> float:
        try:
            size = self._process_set.size()
        except (NotInitializedError, ProcessSetLostError):
            if not self._scale:
                raise
            return self._scale  # nobody can step with it; a state may be restored
        scale = float(self._scale_of(size))
        if not scale > 0:
            raise ValueError(f"scale({size}) is {scale}, and must be more than 0")
        return scale

    def _unscaled(self) -> list[float]:
        """Return the rates for one rank, with changes that the program has made since."""
        return [
            rate if float(group["lr"]) == applied else float(group["lr"]) / self._scale
            for group, rate, applied in zip(
                self.optimizer.param_groups, self._rates, self._applied, strict=False
            )
        ]

    def _set_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
            _set_rate(group, rate * self._scale)
        self._applied = _rates_of(self.optimizer)

    def _set_rates_anew(self, *, always: bool) -> None:
        """Scale the rates by the present number of ranks.

        Args:
            always: whether the optimizer's rates are of another time, because a state was loaded.
                Else nothing changes as long as the number of ranks stays.
        """
        scale = self._scale_now()
        if always or scale != self._scale:
            self._rates = self._rates if always else self._unscaled()
            self._scale = scale
            self._set_rates()


_MARK = "_scaled_by"  # a DistributedOptimizer looks for it, too


def _mark(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Note that the optimizer's rates follow the number of ranks."""
    vars(optimizer)[_MARK] = weakref.ref(scheduler)


def _call(method: weakref.WeakMethod[Callable[..., None]], *, always: bool) -> None:
    found = method()
    if found is not None:
        found(always=always)


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
    other = vars(scheduler.optimizer).get(_MARK, lambda: None)()
    if other is not None:
        raise ValueError(
            f"a {type(other).__name__} scales the rates of this optimizer already: give one "
            "ScaledLR all schedulers, in a ChainedScheduler or a SequentialLR"
        )
    if batch_size is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau counts evaluations, not samples: leave batch_size out, and give "
            "the value to step()"
        )
    if not batch_size > 0 or batch_size != int(batch_size):
        raise ValueError(f"batch_size={batch_size} must be a whole number of samples, 1 or more")


def _rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


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
        ValueError: `warmup` is negative, or `scale` or `steps_per_epoch` is not positive.
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
        scale = world.size() if scale is None else scale
        if warmup < 0 or not scale > 0 or not steps_per_epoch > 0:
            raise ValueError(
                f"warmup={warmup} must be 0 or more, scale={scale} and "
                f"steps_per_epoch={steps_per_epoch} more than 0"
            )
        self.steps_per_epoch = steps_per_epoch

        def factor(step: int) -> float:
            epoch = step / steps_per_epoch
            if epoch < warmup:
                return 1 + (scale - 1) * epoch / warmup
            return scale * (1.0 if after is None else after(epoch))

        super().__init__(optimizer, factor, last_epoch)
        _mark(optimizer, self)

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
