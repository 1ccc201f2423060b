"""InputReport: the cost of the input pipeline to a step, in numbers and a line of advice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torch_ring.data.waits import Waits

__all__ = ["InputReport", "Rates"]

_SMALL = 0.02  # fraction of a step below which a gap is not worth fixing
_FEW = 50  # steps; measurements over fewer are mostly noise


@dataclass(frozen=True)
class Rates:
    """Steps a second with each kind of data, of all ranks together.

    Attributes:
        real: with the loader's batches.
        cached: with a few of its batches again and again: no loader.
        synthetic: with one batch kept on the device: no loader and no copy.
        spread: half the distance from the smallest to the largest gap of the rounds.
        steps: the number of steps measured with each kind.
    """

    real: float
    cached: float
    synthetic: float
    spread: float
    steps: int

    @property
    def gap(self) -> float:
        """The part of the speed that the data cost, ``1 - real / synthetic``."""
        return 1 - self.real / self.synthetic

    @property
    def loader_share(self) -> float:
        """The loader's part of the gap, ``1 - real / cached``; the rest is the copy's."""
        return 1 - self.real / self.cached

    @classmethod
    def of(cls, seconds: Tensor, steps: int) -> Rates:
        """Return the rates measured in some rounds.

        Args:
            seconds: shape [rounds, 3]: the duration of a round's steps with each kind of data, in
                the order of the attributes.
            steps: steps of a round with each kind.
        """
        real, cached, synthetic = (steps / seconds.median(0).values).tolist()
        gaps = 1 - seconds[:, 2] / seconds[:, 0]
        spread = ((gaps.max() - gaps.min()) / 2).item()
        return cls(real, cached, synthetic, spread, steps * len(seconds))


@dataclass(frozen=True)
class InputReport:
    """The measurements of :meth:`InputPipeline.report`, the same on all ranks. Print it.

    Attributes:
        mode: the run's data: real, cached or synthetic.
        ranks: the number of ranks.
        num_workers: workers of a rank's loader; the fewest of any rank.
        spare_workers: workers that :func:`default_num_workers` would add; the fewest of any rank.
        waits: the run's waits for data.
        rates: the speeds with each kind of data, measured after the run; None without `step`.
    """

    mode: str
    ranks: int
    num_workers: int
    spare_workers: int
    waits: Waits
    rates: Rates | None

    @property
    def gap(self) -> float:
        """1 - real / synthetic, of the steps a second; NaN if they were not compared."""
        return self.rates.gap if self.rates else math.nan

    @property
    def loader_share(self) -> float:
        """1 - real / cached, of the steps a second; NaN if they were not compared."""
        return self.rates.loader_share if self.rates else math.nan

    @property
    def advice(self) -> str:
        """The first thing to try, in one line."""
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
        if rates and rates.steps < _FEW:
            lines.append(
                f"  gap            too few steps to tell: {rates.steps} of each kind of data"
            )
        elif rates:
            lines += [
                f"  steps/s        real {rates.real:.2f}, cached {rates.cached:.2f}, synthetic "
                f"{rates.synthetic:.2f} (medians; {rates.steps} steps of each)",
                f"  gap            {_gap(rates)}",
            ]
        return "\n".join([*lines, f"  advice         {self.advice}"])


def _gap(rates: Rates) -> str:
    if rates.gap <= rates.spread:
        return f"none above the noise of +- {rates.spread:.1%}"
    return (
        f"{rates.gap:.1%} +- {rates.spread:.1%} (1 - real/synthetic), "
        f"loader share {rates.loader_share:.1%} (1 - real/cached)"
    )


def _ms(seconds: float) -> str:
    return "none" if math.isnan(seconds) else f"{1000 * seconds:.1f} ms"
