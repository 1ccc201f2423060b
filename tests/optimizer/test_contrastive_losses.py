"""Contrastive losses of gathered features: the weights of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pool import error_of, run
from slow import slow
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from training import FEATURES, ROWS, make_model

import torch_ring as hvd

STEPS = 5
Gather = Callable[[list[Tensor]], list[Tensor]]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make_model(1), make_model(2)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: Tensor) -> list[Tensor]:
        views = batch, batch.flip(1)
        return [
            normalize(tower(x)) for tower, x in zip((self.first, self.second), views, strict=True)
        ]


def clip(model: Towers, batch: Tensor, gather: Gather) -> Tensor:
    images, texts = gather(model(batch))
    logits = model.scale.exp() * images @ texts.T
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def clip_of_own_rows(model: Towers, batch: Tensor, gather: Gather) -> Tensor:
    images, texts = model(batch)
    all_images, all_texts = gather([images, texts])
    own = torch.arange(len(images)) + len(images) * (
        hvd.rank() if len(all_texts) > len(texts) else 0
    )
    scale = model.scale.exp()
    return (
        cross_entropy(scale * images @ all_texts.T, own)
        + cross_entropy(scale * texts @ all_images.T, own)
    ) / 2


def simclr(model: Towers, batch: Tensor, gather: Gather) -> Tensor:
    views = torch.cat(gather(model(batch)))
    similar = (views @ views.T / 0.5).fill_diagonal_(-torch.inf)
    half = len(views) // 2
    return cross_entropy(similar, torch.arange(len(views)).roll(half))


LOSSES = {"clip": clip, "clip_of_own_rows": clip_of_own_rows, "simclr": simclr}


def train(loss: str, way: str) -> None:
    """Train with gathered features, and alone with the whole batch, and compare."""
    size = hvd.size()
    options = {} if way == "default" else {"grad_op": hvd.Sum}

    def gathered(features: list[Tensor]) -> list[Tensor]:
        if way == "grouped":
            return hvd.grouped_allgather(features, **options)
        return [hvd.allgather(each, **options) for each in features]

    def whole(features: list[Tensor]) -> list[Tensor]:
        if way == "default":  # as in Horovod
            for each in features:
                each.register_hook(lambda gradient: gradient / size)
        return features

    ours, expected = Towers(), Towers()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.5))
    alone = torch.optim.SGD(expected.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(7)
    for batch in torch.randn(STEPS, ROWS * size, FEATURES, generator=generator):
        for model, steps, own, gather in (
            (ours, optimizer, batch.chunk(size)[hvd.rank()], gathered),
            (expected, alone, batch, whole),
        ):
            steps.zero_grad()
            LOSSES[loss](model, own, gather).backward()
            steps.step()
    for weight, other in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("loss", "way"),
    [
        ("clip", "grouped"),
        ("simclr", "one by one"),
        ("clip", "default"),
        slow("clip", "one by one"),
        slow("clip_of_own_rows", "grouped"),
        slow("simclr", "default"),
    ],
)
@pytest.mark.parametrize(("transport", "size"), [("shm", 2), slow("tcp", 3)])
def test_weights_are_those_of_the_whole_batch(transport, size, loss, way):
    run(train, size, args=(loss, way), transport=transport)


def other_operators() -> list[tuple[str, str]]:
    x = torch.ones(2, requires_grad=True)
    return [
        error_of(lambda: hvd.allgather(x, grad_op=hvd.Max)),
        error_of(lambda: hvd.grouped_allgather([x], grad_op=hvd.Product)),
    ]


def test_other_operators_are_refused():
    for errors in run(other_operators, 2):
        for kind, text in errors:
            assert kind == "InvalidArgumentError"
            assert "grad_op must be hvd.Average or hvd.Sum" in text
