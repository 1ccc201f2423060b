"""What the input pipeline costs a step, in numbers and in a line of advice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torch_ring.data.waits import Waits

__all__ = ["InputReport", "Rates"]

_SMALL = 0.02  # of a step's time: less is not worth anybody's
_FEW = 50  # steps: what is measured over fewer is mostly noise


@dataclass(frozen=True)
class Rates:
    """Steps a second of all ranks together, compared.

    Attributes:
        real: with what the loader yields.
        cached: with a few of its batches again and again: no loader.
        synthetic: with one batch that lies on the device: no loader and no copy.
        spread: half the distance from the smallest to the largest gap of the rounds.
        steps: how many were measured, of each kind.
    """

    real: float
    cached: float
    synthetic: float
    spread: float
    steps: int

    @property
    def gap(self) -> float:
        """1 - real / synthetic: what part of the speed the data costs."""
        return 1 - self.real / self.synthetic

    @property
    def loader_share(self) -> float:
        """1 - real / cached: what part of it the loader costs; the rest is the copy's."""
        return 1 - self.real / self.cached

    @classmethod
    def of(cls, seconds: Tensor, steps: int) -> Rates:
        """Return the rates of rounds.

        Args:
            seconds: shape [rounds, 3]: what the steps of a round took with each kind of data, in
                the order of the attributes.
            steps: of a round, with each kind.
        """
        real, cached, synthetic = (steps / seconds.median(0).values).tolist()
        gaps = 1 - seconds[:, 2] / seconds[:, 0]
        spread = ((gaps.max() - gaps.min()) / 2).item()
        return cls(real, cached, synthetic, spread, steps * len(seconds))


@dataclass(frozen=True)
class InputReport:
    """What :meth:`InputPipeline.report` measured: the same on all ranks. Print it.

    Attributes:
        mode: of the run: real, cached or synthetic.
        ranks: their number.
        num_workers: of a rank's loader; the fewest.
        spare_workers: how many more :func:`default_num_workers` would have; the fewest.
        waits: for data, in the run.
        rates: with each kind of data, measured after the run; None if they were not.
    """

    mode: str
    ranks: int
    num_workers: int
    spare_workers: int
    waits: Waits
    rates: Rates | None

    @property
    def gap(self) -> float:
        """1 - real / synthetic, of the steps a second; NaN if they were not measured."""
        return self.rates.gap if self.rates else math.nan

    @property
    def loader_share(self) -> float:
        """1 - real / cached, of the steps a second; NaN if they were not measured."""
        return self.rates.loader_share if self.rates else math.nan

    @property
    def advice(self) -> str:
        """What to try first, in one line."""
        waits, rates = self.waits, self.rates
        if (rates or waits).steps < _FEW:
            return f"too few steps to tell: measure {_FEW} or more"
        lost = rates.gap if rates else waits.latest_s * waits.steps_per_s
        if not lost > max(_SMALL, rates.spread if rates else 0.0):
            return "nothing to gain: the data keep up with the model"
        behind_s = waits.slowest_rank_s - waits.others_s
        if behind_s > max(waits.others_s, _SMALL / waits.steps_per_s):
            return (
                f"rank {waits.slowest_rank} keeps the others waiting, {_ms(behind_s)} a step more "
                "than they need: look at its host, its disk and its share of the data"
            )
        if rates and rates.loader_share < rates.gap / 2:
            return (
                "it is the copy to the device rather than the loader: DataLoader(pin_memory=True), "
                "and smaller types (uint8 for images)"
            )
        if self.spare_workers > 0:
            return f"more workers: DataLoader(num_workers={self.num_workers + self.spare_workers})"
        if self.num_workers > 0 and waits.latest_s > 2 * waits.slowest_rank_s:
            return (
                "a different rank is late in each step: longer queues even that out, "
                "DataLoader(prefetch_factor=8)"
            )
        return (
            "no CPU is free for more workers: cheaper transforms (torchvision.transforms.v2 on "
            "uint8, on the device, or once before training), smaller files"
        )

    def __str__(self) -> str:
        waits, rates = self.waits, self.rates
        lines = [
            f"input pipeline: {waits.steps} steps with {self.mode} data on {self.ranks} "
            f"rank{'s' * (self.ranks > 1)}"
            + (f", {waits.steps_per_s:.2f} steps/s" if waits.steps else ""),
            f"  wait for data  mean {_ms(waits.mean_s)}, p95 {_ms(waits.p95_s)}, max "
            f"{_ms(waits.max_s)}; latest rank of a step {_ms(waits.latest_s)}; first batch of an "
            f"epoch {_ms(waits.first_s)}",
            f"  slowest rank   {waits.slowest_rank}, mean {_ms(waits.slowest_rank_s)}",
        ]
        if rates:
            lines += [
                f"  steps/s        real {rates.real:.2f}, cached {rates.cached:.2f}, synthetic "
                f"{rates.synthetic:.2f} (medians; {rates.steps} steps of each)",
                f"  gap            {rates.gap:.1%} +- {rates.spread:.1%} (1 - real/synthetic), "
                f"loader share {rates.loader_share:.1%} (1 - real/cached)",
            ]
        return "\n".join([*lines, f"  advice         {self.advice}"])


def _ms(seconds: float) -> str:
    return "none" if math.isnan(seconds) else f"{1000 * seconds:.1f} ms"
