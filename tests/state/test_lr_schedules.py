# SPDX-License-Identifier: Apache-2.0
"""Learning rates: Goyal's warm-up, the decays, and a state that fits another number of ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from on_ranks import on_ranks
from torch.optim import SGD

import torch_ring as hvd
from torch_ring.lr_schedules import WarmupLR, cosine_decay, step_decay


def make_optimizer(*rates: float, **options: object) -> SGD:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return SGD(groups, lr=1.0, **options)


def rates_of(optimizer: SGD, scheduler: WarmupLR, steps: int) -> list[float]:
    """Return the first group's rate in each of these steps."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        scheduler.step()
    return rates


def test_schedule_of_imagenet():
    """Goyal et al. 2017: 0.1 to 0.8 on 8 ranks over 5 epochs, a tenth at epochs 30, 60 and 80."""
    optimizer = make_optimizer(0.1)
    decay = step_decay([30, 60, 80])
    scheduler = WarmupLR(optimizer, 5, decay, steps_per_epoch=4, scale=8)
    rates = rates_of(optimizer, scheduler, 90 * 4)
    assert rates[: 5 * 4] == pytest.approx([0.1 + 0.7 * step / 20 for step in range(20)])
    for epochs, rate in (((5, 30), 0.8), ((30, 60), 0.08), ((60, 80), 0.008), ((80, 90), 0.0008)):
        begin, end = (4 * epoch for epoch in epochs)
        assert rates[begin:end] == pytest.approx([rate] * (end - begin))


def test_cosine_decay():
    optimizer = make_optimizer(1.0)
    after = cosine_decay(10, 30, floor=0.1)
    rates = rates_of(optimizer, WarmupLR(optimizer, 10, after, scale=2), 40)
    assert rates[:10] == pytest.approx([1 + step / 10 for step in range(10)])
    assert rates[10] == 2
    assert rates[20] == pytest.approx(2 * 0.55)
    assert rates[15] == pytest.approx(2 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2))
    assert rates[30:] == pytest.approx([0.2] * 10)


@pytest.mark.parametrize(("warmup", "scale"), [(0, 4), (3, 1), (0.5, 0.5)])
def test_warm_ups_of_any_length_and_scale(warmup, scale):
    optimizer = make_optimizer(1.0)
    rates = rates_of(optimizer, WarmupLR(optimizer, warmup, scale=scale, steps_per_epoch=2), 10)
    steps = int(2 * warmup)
    want = [1 + (scale - 1) * step / steps for step in range(steps)] + [scale] * (10 - steps)
    assert rates == pytest.approx(want)


def test_groups_and_rates_in_tensors():
    optimizer = make_optimizer(0.1, 0.4)
    scheduler = WarmupLR(optimizer, 2, scale=3)
    rates_of(optimizer, scheduler, 1)
    assert scheduler.get_last_lr() == pytest.approx([0.2, 0.8])

    rate = torch.tensor(0.5)
    optimizer = make_optimizer(rate, foreach=False)
    scheduler = WarmupLR(optimizer, 2, scale=3)
    optimizer.step()
    scheduler.step()
    assert rate.item() == 1.0  # in place, like torch's schedulers
    state = copy.deepcopy(scheduler.state_dict())
    optimizer.step()
    scheduler.step()
    scheduler.load_state_dict(state)
    assert rate.item() == 1.0


def test_a_state_fits_another_number_of_ranks(tmp_path):
    """Twice the ranks take half the steps an epoch, with twice the rate."""
    after = step_decay([30])
    for epoch, want in ((2.5, 0.1 * (1 + 7 / 2)), (10, 0.8), (40, 0.08)):
        optimizer = make_optimizer(0.1)
        scheduler = WarmupLR(optimizer, 5, after, steps_per_epoch=8, scale=4)
        rates_of(optimizer, scheduler, int(8 * epoch))
        file = tmp_path / "state"
        torch.save((optimizer.state_dict(), scheduler.state_dict()), file)
        states = torch.load(file, weights_only=True)

        optimizer = make_optimizer(0.1)
        other = WarmupLR(optimizer, 5, after, steps_per_epoch=4, scale=8)
        optimizer.load_state_dict(states[0])
        other.load_state_dict(states[1])
        assert other.last_epoch == 4 * epoch
        assert rates_of(optimizer, other, 1) == pytest.approx([want])
        assert other.state_dict()["steps_per_epoch"] == 4


def test_wrong_schedules_are_refused():
    for options in ({"warmup": -1}, {"scale": 0}, {"steps_per_epoch": 0}):
        with pytest.raises(ValueError, match="must be"):
            WarmupLR(make_optimizer(0.1), **{"warmup": 1, "scale": 2} | options)
    with pytest.raises(ValueError, match="must be"):
        cosine_decay(5, 5)


@on_ranks(2)
def test_the_scale_is_the_number_of_ranks() -> None:
    optimizer = make_optimizer(0.1)
    parameters = [group["params"][0] for group in optimizer.param_groups]
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("w", parameters[0])])
    scheduler = WarmupLR(optimizer, 2)
    rates = []
    for _ in range(4):
        optimizer.zero_grad()
        parameters[0].sum().backward()
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1, 0.15, 0.2, 0.2])
