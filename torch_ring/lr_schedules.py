"""WarmupLR: learning rates for many ranks, with scaling, warm-up and decay."""

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
            rate = base * factor(self.last_epoch)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
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
