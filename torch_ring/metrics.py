"""Means over the samples of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ring.collectives.allreduce import allreduce
from torch_ring.collectives.reduce_op import Sum
from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["Mean", "Means"]

_Number = float | Tensor


class Means:
    """Means of several quantities over the samples of all ranks, by one allreduce.

    ::

        means = Means("loss", "accuracy")
        for images, labels in loader:
            ...
            means.update(len(images), loss=loss, accuracy=accuracy)
        values = means.compute()  # on all ranks

    Every sample counts the same, however the ranks' batches and shares differ. Sums are kept in
    float64, on the device of the values: `update` does not wait for a GPU.

    Args:
        names: of the quantities, the same on all ranks.
        process_set: the ranks over whose samples they are taken.

    Raises:
        ValueError: there is no name.
    """

    def __init__(self, *names: str, process_set: ProcessSet = global_process_set) -> None:
        if not names:
            raise ValueError("name the quantities: Means('loss', 'accuracy')")
        self.process_set = process_set
        self._sums: dict[str, tuple[_Number, _Number]] = dict.fromkeys(names, (0.0, 0.0))

    def update(self, count: int | Tensor = 1, /, **values: float | Tensor) -> None:
        """Add this rank's means over some samples; a quantity may be left out.

        Args:
            count: of the samples; 0 is allowed, and the values are ignored then. A tensor of one
                element where only the device knows.
            values: means over these samples, each a number or a tensor of one element.

        Raises:
            ValueError: a quantity that has no name here, or a tensor of more elements.
        """
        weight = _scalar("count", count)
        for name, given in values.items():
            if name not in self._sums:
                raise ValueError(f"{name!r} is none of {', '.join(self._sums)}")
            total, samples = self._sums[name]
            product = _times(_scalar(name, given), weight)
            self._sums[name] = (total + product, samples + weight)

    def compute(self) -> dict[str, float]:
        """Return the means over the samples of all ranks; NaN where there were none at all.

        A collective of all ranks of the set, also of those without samples. What has been added
        stays; see `reset`.
        """
        sums = [[float(part) for part in pair] for pair in self._sums.values()]
        # On the host: a rank without samples does not know on which device the others have theirs.
        totals = allreduce(
            torch.tensor(sums, dtype=torch.float64), op=Sum, process_set=self.process_set
        )
        means = totals[:, 0] / totals[:, 1]
        return dict(zip(self._sums, means.tolist(), strict=True))

    def reset(self) -> None:
        """Forget what has been added."""
        self._sums = dict.fromkeys(self._sums, (0.0, 0.0))


class Mean:
    """The mean of one quantity over the samples of all ranks; see :class:`Means`.

    Args:
        process_set: the ranks over whose samples it is taken.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        self._means = Means("mean", process_set=process_set)

    def update(self, value: float | Tensor, count: int | Tensor = 1) -> None:
        """Add this rank's mean over `count` samples, which may be 0."""
        self._means.update(count, mean=value)

    def compute(self) -> float:
        """Return the mean over the samples of all ranks, or NaN. A collective of all of them."""
        return self._means.compute()["mean"]

    def reset(self) -> None:
        """Forget what has been added."""
        self._means.reset()


def _times(value: _Number, weight: _Number) -> _Number:
    """Return the product; 0 for no weight, though the mean over no samples is NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, value * weight, 0.0)
    return value * weight if weight > 0 else 0.0


def _scalar(name: str, value: float | Tensor) -> _Number:
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"{name} has the shape {list(value.shape)}: must be one number")
    return value.detach().double().reshape(())
