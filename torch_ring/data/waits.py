"""WaitLog: the time that each rank's steps wait for their batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_ring.collectives.allgather import allgather
from torch_ring.collectives.allreduce import allreduce
from torch_ring.collectives.reduce_op import Min
from torch_ring.world.process_set import ProcessSet

__all__ = ["WaitLog", "Waits"]

_KEPT = 4096  # last steps that are kept at least: enough for a p95, and 32 KiB a rank to gather


@dataclass(frozen=True)
class Waits:
    """The waits of a run's steps for their batches, in seconds. The same on all ranks.

    An epoch's first step counts in `steps` and in `first_s` only. Means over no steps are NaN.

    Attributes:
        steps: the number of steps on the rank with the fewest.
        steps_per_s: the rate of the slowest rank; time outside the loops over batches is left out.
        mean_s, p95_s, max_s: over all ranks and the last 4096 steps or more.
        latest_s: the longest wait of any rank in a step, averaged over the steps: the time that a
            step loses, because all ranks wait for the latest.
        slowest_rank, slowest_rank_s: the rank that waits longest on average, and its mean wait.
        others_s: the median of the other ranks' mean waits.
        first_s: the wait for an epoch's first batch, while the workers start: the mean over the
            epochs, of the rank where it is longest.
    """

    steps: int
    steps_per_s: float
    mean_s: float
    p95_s: float
    max_s: float
    latest_s: float
    slowest_rank: int
    slowest_rank_s: float
    others_s: float
    first_s: float


class WaitLog:
    """The waits of one rank, as its caller has timed them."""

    def __init__(self) -> None:
        self._steps = 0
        self._elapsed_s = 0.0
        self._last_s = array("d")
        self._first_s = array("d")

    def add(self, wait_s: float, *, is_first: bool) -> None:
        """Add the wait for a batch; `is_first` marks the first batch of an epoch."""
        self._steps += 1
        if is_first:
            self._first_s.append(wait_s)
            return
        self._last_s.append(wait_s)
        if len(self._last_s) == 2 * _KEPT:
            del self._last_s[:_KEPT]

    def add_elapsed(self, seconds: float) -> None:
        """Add the duration of a loop over batches, its waits included."""
        self._elapsed_s += seconds

    def gather(self, process_set: ProcessSet) -> Waits:
        """Return the waits of all ranks of the set. A collective of them."""
        counts = torch.tensor([self._steps, len(self._last_s)], device="cpu")
        steps, kept = allreduce(counts, op=Min, process_set=process_set).tolist()
        rate = steps / self._elapsed_s if steps else torch.nan
        mine = self._last_s[len(self._last_s) - kept :]  # the same steps on all ranks
        row = _tensor([rate, _tensor(self._first_s).mean().item(), *mine])
        table = allgather(row[None], process_set=process_set)  # [ranks, 2 + kept]
        return summary(steps, table[:, 0], table[:, 1], table[:, 2:], process_set.ranks or [])


def summary(
    steps: int, rates: Tensor, firsts_s: Tensor, waits_s: Tensor, ranks: list[int]
) -> Waits:
    """Return the `Waits` that follow from the ranks' measurements.

    Args:
        steps: the number of steps on the rank with the fewest.
        rates: shape [ranks]; steps a second.
        firsts_s: shape [ranks]; mean waits for an epoch's first batch.
        waits_s: shape [ranks, steps]; waits of the other steps.
        ranks: the ranks of the set, ascending.
    """
    first_s, rate = firsts_s.max().item(), rates.min().item()
    if waits_s.shape[1] == 0:
        nan = torch.nan
        return Waits(steps, rate, nan, nan, nan, nan, ranks[0], nan, nan, first_s)
    of_ranks = waits_s.mean(1)
    return Waits(
        steps=steps,
        steps_per_s=rate,
        mean_s=waits_s.mean().item(),
        p95_s=waits_s.flatten().sort().values[int(0.95 * (waits_s.numel() - 1))].item(),
        max_s=waits_s.max().item(),
        latest_s=waits_s.max(0).values.mean().item(),
        slowest_rank=ranks[int(of_ranks.argmax())],
        slowest_rank_s=of_ranks.max().item(),
        others_s=of_ranks.sort().values[:-1].median().item() if len(ranks) > 1 else torch.nan,
        first_s=first_s,
    )


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
