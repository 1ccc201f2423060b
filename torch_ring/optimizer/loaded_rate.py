# SPDX-License-Identifier: Apache-2.0
"""LoadedRate: tells of a learning rate that a state has brought from another number of ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torch_ring.errors import NotInitializedError, ProcessSetLostError
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet

__all__ = ["RANKS", "LoadedRate"]

_log = logging.getLogger("torch_ring")

RANKS = "torch_ring_ranks"
"""The key in an optimizer's ``state_dict()`` for the number of ranks that step together."""

# Attributes that torch_ring.lr_schedules gives an optimizer: while a ScaledLR or a living WarmupLR
# (a weak reference) sets the rates for the present ranks.
_SCALED, _WARMED_UP = "_lr_scaling", "_scaled_by"


class LoadedRate:
    """Warns at the first step with the rate that `load_state_dict` has brought from other ranks.

    Not before: a program may set the rate after it has loaded the state, or only evaluate.

    Thread: one at a time. Blocking: no.

    Args:
        process_set: the ranks that step together.

    Attributes:
        ranks: those of the last state, if they are others and nothing was told of it; 0: a state
            that does not say so has brought another rate to several ranks.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self.ranks: int | None = None
        self._rates: list[float] = []  # of that state
        self._rates_before: list[float] = []  # if it does not say of how many ranks it is

    def hook(self, optimizer: Optimizer) -> None:
        """Let the optimizer's states say for how many ranks their rates are."""
        if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):  # torch's __init__() was called
            optimizer.register_state_dict_post_hook(self._write)
            optimizer.register_load_state_dict_pre_hook(self._read)

    def after_load(self, optimizer: Optimizer) -> None:
        """Note the rates that a state has brought."""
        if self._rates_before and self._rates_before != _rates_of(optimizer):
            self.ranks = 0
        self._rates = [] if self.ranks is None else _rates_of(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Warn, once, if the optimizer is about to step with such a rate. Call it if `ranks`."""
        ranks, self.ranks = self.ranks, None
        rates, warmup = _rates_of(optimizer), vars(optimizer).get(_WARMED_UP, lambda: None)()
        if not rates or rates != self._rates or warmup is not None:
            return
        if current.rank() != (self._process_set.ranks or [0])[0]:
            return
        size = self._process_set.size()
        if not ranks:
            _log.warning(
                "the optimizer's state does not say of how many ranks it is, and has brought the "
                "learning rate %g in place of %g. If it is of a program without torch_ring, set "
                "group['lr'] for %d ranks after loading: "
                "docs/input-pipeline.md#go-on-with-another-number-of-ranks",
                rates[0],
                self._rates_before[0],
                size,
            )
        elif _SCALED in vars(optimizer):
            _log.warning(
                "the optimizer's state is of %d ranks without ScaledLR, which takes its learning "
                "rate for that of one: this step has %g. If it was that of %d ranks, set "
                "group['lr'] for the present ranks after loading: "
                "docs/input-pipeline.md#learning-rates",
                ranks,
                rates[0],
                ranks,
            )
        elif ranks != size:
            _log.warning(
                "the optimizer's state is of %d rank%s, and %d continue%s with its learning rate "
                "%g: adapt the rate, and whatever counts steps or batches (a schedule, a place in "
                "the data), unless the batch of all ranks together is the same. "
                "lr_schedules.ScaledLR does it: docs/input-pipeline.md#go-on-with-another-"
                "number-of-ranks",
                ranks,
                "" if ranks == 1 else "s",
                size,
                "s" if size == 1 else "",
                rates[0],
            )

    def _write(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        with contextlib.suppress(NotInitializedError, ProcessSetLostError):
            state_dict[RANKS] = self._process_set.size()

    def _read(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        ranks, right = state_dict.get(RANKS), None
        self._rates_before = []
        with contextlib.suppress(NotInitializedError, ProcessSetLostError):
            right = self._process_set.size()
        if _SCALED in vars(optimizer):
            groups = state_dict.get("param_groups", ())
            right = ranks if all("lr_scale" in group for group in groups) else 1
        elif RANKS not in state_dict and right is not None and right > 1:
            self._rates_before = _rates_of(optimizer)
        self.ranks = ranks if isinstance(ranks, int) and ranks != right else None


def _rates_of(optimizer: Optimizer) -> list[float]:
    """Return the rates that are numbers; Adafactor may have none."""
    rates: Iterator[Any] = (group.get("lr") for group in optimizer.param_groups)
    return [
        float(rate)
        for rate in rates
        if (rate.numel() == 1 if isinstance(rate, Tensor) else isinstance(rate, Real))
    ]
