# SPDX-License-Identifier: Apache-2.0
"""Means over the samples of all ranks, which may have different numbers of samples."""

import math

import pytest
import torch
from on_ranks import on_ranks

import torch_ring as hvd
from torch_ring.metrics import Mean, Means


@on_ranks(1, 3)
def test_means_over_all_ranks() -> None:
    rank, size = hvd.rank(), hvd.size()
    metrics = Means("loss", "accuracy", "never")
    mean = Mean()
    losses, rights, count = 0.0, 0.0, 0
    for r in range(size):
        for batch in range(r):  # rank 0 has none
            samples, loss, right = batch + 1, 10.0 * r + batch, 0.25 * r
            losses, rights, count = (
                losses + samples * loss,
                rights + samples * right,
                count + samples,
            )
            if r != rank:
                continue
            weight = torch.tensor([samples]) if batch % 2 else samples
            loss = torch.tensor(loss, requires_grad=True) if r == 1 else loss
            metrics.update(weight, loss=loss)
            metrics.update(weight, accuracy=right)
            mean.update(loss, weight)
    # A batch without samples: its means are NaN.
    metrics.update(0, loss=torch.tensor(math.nan), accuracy=math.nan)
    metrics.update(torch.tensor(0), loss=torch.tensor(math.nan))
    for _ in range(2):  # compute() keeps the sums
        values = metrics.compute()
        assert list(values) == ["loss", "accuracy", "never"]
        assert math.isnan(values["never"])
        if size == 1:
            assert math.isnan(values["loss"])
            assert math.isnan(mean.compute())
        else:
            assert values["loss"] == mean.compute()
            assert values["loss"] == pytest.approx(losses / count, rel=1e-12)
            assert values["accuracy"] == pytest.approx(rights / count, rel=1e-12)
    metrics.reset()
    mean.reset()
    metrics.update(loss=rank)  # of one sample
    mean.update(rank)
    assert metrics.compute()["loss"] == mean.compute() == (size - 1) / 2

    # Single precision would lose the small ones.
    mean = Mean()
    mean.update(torch.tensor(1.0), 2**25)
    for _ in range(1000):
        mean.update(torch.tensor(0.0))
    assert mean.compute() == pytest.approx(1 / (1 + 1000 / 2**25), rel=1e-12)

    pair = hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
    if rank in (0, size - 1):
        of_pair = Mean(process_set=pair)
        of_pair.update(float(rank))
        assert of_pair.compute() == (size - 1) / 2


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="name the quantities"):
        Means()
    metrics = Means("loss")
    with pytest.raises(ValueError, match="'los' is none of loss"):
        metrics.update(1, los=1.0)
    with pytest.raises(ValueError, match=r"loss has the shape \[2\]"):
        metrics.update(1, loss=torch.ones(2))
    with pytest.raises(ValueError, match=r"count has the shape \[3\]"):
        metrics.update(torch.ones(3), loss=1.0)
    with pytest.raises(hvd.NotInitializedError):
        metrics.compute()
