# SPDX-License-Identifier: Apache-2.0
"""Mean and Means: averages over the samples of all ranks."""

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

    Every sample has the same weight, even if ranks have different numbers of samples. Sums are
    kept in float64, on the device of the values: `update` does not wait for a GPU.

    Args:
        names: the names of the quantities, the same on all ranks.
        process_set: the ranks whose samples count; by default all.

    Raises:
        ValueError: no name is given.
    """

    def __init__(self, *names: str, process_set: ProcessSet = global_process_set) -> None:
        if not names:
            raise ValueError("name the quantities: Means('loss', 'accuracy')")
        self.process_set = process_set
        self._sums: dict[str, tuple[_Number, _Number]] = dict.fromkeys(names, (0.0, 0.0))

    def update(self, count: int | Tensor = 1, /, **values: float | Tensor) -> None:
        """Add this rank's means over some samples; a quantity may be left out.

        Args:
            count: the number of samples; with 0 the values are ignored. A tensor of one element
                if only the device knows the number.
            values: means over these samples, by name, each a number or a tensor of one element.

        Raises:
            ValueError: a name was not given to the constructor, or a tensor does not have exactly
                one element.
        """
        weight = _scalar("count", count)
        for name, given in values.items():
            if name not in self._sums:
                raise ValueError(f"{name!r} is none of {', '.join(self._sums)}")
            total, samples = self._sums[name]
            product = _times(_scalar(name, given), weight)
            self._sums[name] = (total + product, samples + weight)

    def compute(self) -> dict[str, float]:
        """Return the means over the samples of all ranks.

        A collective of all ranks of the set, even of those without samples. The sums stay until
        `reset`.

        Returns:
            The means by name, the same on all ranks; NaN for a quantity without samples.

        Raises:
            RingError: MismatchError, PeerLostError or TimeoutError.
        """
        sums = [[float(part) for part in pair] for pair in self._sums.values()]
        # On the host: a rank without samples does not know the device of the others' sums.
        own = torch.tensor(sums, dtype=torch.float64, device="cpu")
        totals = allreduce(own, op=Sum, process_set=self.process_set)
        means = totals[:, 0] / totals[:, 1]
        return dict(zip(self._sums, means.tolist(), strict=True))

    def reset(self) -> None:
        """Forget all samples."""
        self._sums = dict.fromkeys(self._sums, (0.0, 0.0))


class Mean:
    """The mean of one quantity over the samples of all ranks.

    Every sample has the same weight, even if ranks have different numbers of samples.

    Args:
        process_set: the ranks whose samples count; by default all.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        self._means = Means("mean", process_set=process_set)

    def update(self, value: float | Tensor, count: int | Tensor = 1) -> None:
        """Add this rank's mean over some samples.

        Args:
            value: the mean over these samples: a number, or a tensor of one element.
            count: the number of samples; with 0 the value is ignored. A tensor of one element if
                only the device knows the number.

        Raises:
            ValueError: a tensor does not have exactly one element.
        """
        self._means.update(count, mean=value)

    def compute(self) -> float:
        """Return the mean over the samples of all ranks. A collective, even without samples.

        Returns:
            The mean, the same on all ranks; NaN without samples.

        Raises:
            RingError: MismatchError, PeerLostError or TimeoutError.
        """
        return self._means.compute()["mean"]

    def reset(self) -> None:
        """Forget all samples."""
        self._means.reset()


def _times(value: _Number, weight: _Number) -> _Number:
    """Return the product, 0 if the weight is 0: the mean over no samples may be NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, value * weight, 0.0)
    return value * weight if weight > 0 else 0.0


def _scalar(name: str, value: float | Tensor) -> _Number:
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"{name} has the shape {list(value.shape)}: must be one number")
    return value.detach().double().reshape(())
