"""Learning rates for many ranks: warm-up, scaling, and what comes after."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torch_ring import world

__all__ = ["WarmupLR", "cosine_decay", "step_decay"]

Factor = Callable[[int], float]


class WarmupLR(LambdaLR):
    """Raises the learning rate from the optimizer's to `scale` times that, then follows a decay.

    Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv:1706.02677): a step that averages over
    `size` batches may be `size` times as long, once the first steps, in which the weights change
    fast, have been taken with a rate that grows linearly. At step t of a warm-up of w steps it is
    ``lr * (1 + (scale - 1) * t / w)``, and afterwards ``lr * scale * after(t)``::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # right for one rank
        n = len(loader)
        decay = step_decay([30 * n, 60 * n, 80 * n])
        scheduler = WarmupLR(optimizer, warmup=5 * n, after=decay)
        ...
        optimizer.step()
        scheduler.step()

    It counts its own `step` calls, once a batch here; with one call an epoch, `warmup` and
    `after` count epochs. A state loaded on another number of ranks goes on at the same t, with the
    rate that is right for this number.

    Args:
        optimizer: wrapped or not, with the learning rates that are right for one rank.
        warmup: steps, or epochs; 0: none.
        after: the factor by which the rate is less, by the number of steps since the beginning,
            such as :func:`step_decay` and :func:`cosine_decay`; None: 1.
        scale: None: the number of ranks. Another where a step averages over more batches
            (``backward_passes_per_step``), or where rates do not add up (Adasum; the square root is
            common with Adam).
        last_epoch: as in torch's schedulers.

    Raises:
        ValueError: `warmup` is negative, or `scale` is not positive.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: int,
        after: Factor | None = None,
        *,
        scale: float | None = None,
        last_epoch: int = -1,
    ) -> None:
        if scale is None:
            scale = world.size()
        if warmup < 0 or not scale > 0:
            raise ValueError(f"warmup={warmup} must be 0 or more, scale={scale} positive")
        # Not attributes: a state must not bring those of another run.
        super().__init__(optimizer, _factor(warmup, scale, after), last_epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken; sets the rates of the optimizer, so load that first."""
        super().load_state_dict(state_dict)
        for group, base, factor in zip(
            self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True
        ):
            rate = base * factor(self.last_epoch)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _factor(warmup: int, scale: float, after: Factor | None) -> Factor:
    def factor(step: int) -> float:
        if step < warmup:
            return 1 + (scale - 1) * step / warmup
        return scale * (1.0 if after is None else after(step))

    return factor


def step_decay(milestones: Sequence[int], gamma: float = 0.1) -> Factor:
    """Return a factor that is multiplied by `gamma` at each milestone.

    Args:
        milestones: ascending, in steps since the beginning.
        gamma: 0.1 in Goyal et al. 2017, at epochs 30, 60 and 80.
    """
    return lambda step: gamma ** bisect_right(milestones, step)


def cosine_decay(begin: int, end: int, floor: float = 0.0) -> Factor:
    """Return a factor that falls from 1 to `floor` along half a cosine (arXiv:1608.03983).

    Args:
        begin: in steps since the beginning, such as the end of the warm-up; 1 until then.
        end: in steps since the beginning, such as the end of the training; `floor` from then on.
        floor: from 0 to 1.
    """

    def factor(step: int) -> float:
        done = min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return factor
