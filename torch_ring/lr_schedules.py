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

Factor = Callable[[float], float]


class WarmupLR(LambdaLR):
    """Raises the learning rate from the optimizer's to `scale` times that, then lets it decay.

    Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv:1706.02677): a step that averages over
    `size` batches may be `size` times as long, once the first ones, in which the weights change
    fast, have been taken with a rate that grows linearly. During a warm-up of w epochs it is
    ``lr * (1 + (scale - 1) * epoch / w)``, and afterwards ``lr * scale * after(epoch)``::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # right for one rank
        scheduler = WarmupLR(
            optimizer, warmup=5, after=step_decay([30, 60, 80]), steps_per_epoch=len(loader)
        )
        ...
        optimizer.step()
        scheduler.step()  # after each batch

    A state that is loaded on another number of ranks goes on at the same epoch, with the rate that
    is right for this number.

    Args:
        optimizer: wrapped or not, with the learning rates that are right for one rank.
        warmup: epochs; 0: none.
        after: the factor of the decay, by the number of epochs since the beginning, such as
            :func:`step_decay` or :func:`cosine_decay`; None: 1.
        steps_per_epoch: how many calls of ``step()`` make an epoch, not necessarily whole:
            ``len(loader)`` before a :class:`ShardedSampler` has loaded its state, as it is what is
            left of the epoch afterwards. 1: call it once an epoch, or let `warmup` and `after`
            count steps, whatever the number of ranks.
        scale: None: the number of ranks. Another where a step averages over more batches
            (``backward_passes_per_step``), or where rates do not add up (1 with Adasum; its square
            root is common with Adam).
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
        # `scale` and the others are no attributes: a state must not bring those of another run.
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken; sets the rates of the optimizer, so load that first."""
        steps_per_epoch = self.steps_per_epoch
        super().load_state_dict(state_dict)
        self.last_epoch = round(self.last_epoch * steps_per_epoch / self.steps_per_epoch)
        self.steps_per_epoch = steps_per_epoch
        for group, base, factor in zip(
            self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True
        ):
            rate = base * factor(self.last_epoch)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def step_decay(milestones: Sequence[float], gamma: float = 0.1) -> Factor:
    """Return a factor that is multiplied by `gamma` at each milestone.

    Args:
        milestones: ascending, in epochs since the beginning, or in what `WarmupLR` counts.
        gamma: Goyal et al. 2017 have 0.1, at epochs 30, 60 and 80.
    """
    return lambda epoch: gamma ** bisect_right(milestones, epoch)


def cosine_decay(begin: float, end: float, floor: float = 0.0) -> Factor:
    """Return a factor that falls from 1 to `floor` along half a cosine (arXiv:1608.03983).

    Args:
        begin: in epochs, such as the end of the warm-up; it is 1 until then.
        end: in epochs, such as the end of the training; it is `floor` from then on.
        floor: from 0 to 1.

    Raises:
        ValueError: `end` is not after `begin`.
    """
    if not begin < end:
        raise ValueError(f"end={end} must be after begin={begin}")

    def factor(epoch: float) -> float:
        done = min(max((epoch - begin) / (end - begin), 0.0), 1.0)
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return factor
