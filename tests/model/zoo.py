# SPDX-License-Identifier: Apache-2.0
"""The models of the programs: small, the same wherever they are made, each odd in its own way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

FEATURES = 8
WORDS = 12


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def net(seed: int = 1) -> nn.Sequential:
    """Return layers in a row. Their 227 weights fill no round number."""
    torch.manual_seed(seed)
    return nn.Sequential(linear(FEATURES, 16), nn.Tanh(), linear(16, 4), linear(4, 3))


class Towers(nn.Module):
    """Two nets, whose features a contrastive loss compares."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(1), net(2)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, rows: Tensor) -> list[Tensor]:
        return [normalize(self.first(rows)), normalize(self.second(rows.flip(1)))]


class Recomputed(nn.Module):
    """The net, which backward computes once more."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, rows: Tensor) -> Tensor:
        return checkpoint(self.net, rows, use_reentrant=False)


class Tied(nn.Module):
    """A weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = linear(8, 8), linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(rows)))


class Strided(nn.Module):
    """A convolution in channels_last, a complex weight, a transposed one, a scalar, an empty one.

    In float32, beside the complex weight of 64 bits.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, rows: Tensor) -> Tensor:
        image = rows.float().view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        hidden = self.convolution(image).flatten(1) @ self.transposed.t()
        spectrum = torch.fft.fft(hidden) * self.spectrum
        return spectrum.real * self.scale + self.nothing.sum()


class Reader(nn.Module):
    """A sparse parameter among dense ones; it takes the numbers of words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, 3, sparse=True, dtype=torch.float64)
        self.head = linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words)).tanh()


class Quantised(nn.Module):
    """A layer on frozen weights, whose dtypes have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        weights = torch.arange(3 * FEATURES, dtype=torch.int8).view(3, FEATURES)
        self.quantised = nn.Parameter(weights, requires_grad=False)
        self.counts = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
        low = torch.full((3,), 0.5).to(torch.float8_e4m3fn)
        self.low = nn.Parameter(low, requires_grad=False)
        self.top = linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.top(rows @ self.quantised.double().t() / 100 + self.low.double())


class Segments(nn.Module):
    """Layers that run in reentrant segments of torch.utils.checkpoint, or without.

    Args:
        again: also use the shared layer outside segments, behind its two uses inside. The layer
            between those runs outside, too.
    """

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.again = again
        self.first, self.shared, self.middle = linear(8, 8), linear(8, 8), linear(8, 8)
        self.last = self.shared if again else linear(8, 3)

    def forward(self, rows: Tensor, segments: bool) -> Tensor:
        def segment(layer: nn.Module, value: Tensor) -> Tensor:
            return checkpoint(layer, value, use_reentrant=True) if segments else layer(value)

        hidden = segment(self.shared, self.first(rows).tanh()).tanh()
        hidden = (self.middle(hidden) if self.again else segment(self.middle, hidden)).tanh()
        hidden = segment(self.shared, hidden).tanh()
        return self.last(hidden)
