"""How long each rank's steps wait for their batches."""

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

_KEPT = 4096  # of the last steps: enough for a p95, and 32 KiB a rank to gather


@dataclass(frozen=True)
class Waits:
    """What the steps of a run waited for; NaN if there were none. The same on all ranks.

    The first steps of epochs count as `steps`, and in `first_s` only.

    Attributes:
        steps: on the rank with the fewest.
        steps_per_s: what is done outside the loops over the batches is left out.
        mean_s, p95_s, max_s: over all ranks and the last steps (4096 or more, if there were), in
            seconds.
        latest_s: the longest wait of any rank in a step, the mean over the steps: what a step
            loses, as each waits for the latest rank.
        slowest_rank, slowest_rank_s: the rank that waits longest on average, and how long.
        others_s: how long the other ranks wait on average, their median.
        first_s: for the first batch of an epoch, when the workers start: the mean over the epochs
            of the rank where it is longest.
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
    """The waits of one rank; the caller takes the time."""

    def __init__(self) -> None:
        self._steps = 0
        self._elapsed_s = 0.0
        self._last_s = array("d")
        self._first_s = array("d")

    def add(self, wait_s: float, *, is_first: bool) -> None:
        """Add the wait for a batch, which is or is not the first of its epoch."""
        self._steps += 1
        if is_first:
            self._first_s.append(wait_s)
            return
        self._last_s.append(wait_s)
        if len(self._last_s) == 2 * _KEPT:
            del self._last_s[:_KEPT]

    def add_elapsed(self, seconds: float) -> None:
        """Add what a loop over batches took, waits and all."""
        self._elapsed_s += seconds

    def gather(self, process_set: ProcessSet) -> Waits:
        """Return the waits of all ranks of the set, which all call it."""
        counts = torch.tensor([self._steps, len(self._last_s)])
        steps, kept = allreduce(counts, op=Min, process_set=process_set).tolist()
        rate = steps / self._elapsed_s if steps else torch.nan
        mine = self._last_s[len(self._last_s) - kept :]  # on all ranks of the same steps
        row = _tensor([rate, _tensor(self._first_s).mean().item(), *mine])
        table = allgather(row[None], process_set=process_set)  # [ranks, 2 + kept]
        return summary(steps, table[:, 0], table[:, 1], table[:, 2:], process_set.ranks or [])


def summary(
    steps: int, rates: Tensor, firsts_s: Tensor, waits_s: Tensor, ranks: list[int]
) -> Waits:
    """Return what the ranks' measurements come to.

    Args:
        steps: of the rank with the fewest.
        rates: of each rank, in steps a second.
        firsts_s: of each rank, the mean wait for an epoch's first batch.
        waits_s: shape [ranks, steps]; of the other steps.
        ranks: the number of each rank.
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
    return torch.tensor(values, dtype=torch.float64)
