"""Ranks that drift apart in planned passes: a warning, and no host waits for a comparison."""

from __future__ import annotations

import functools

import device_double
import pytest
from ahead_training import PLANNED, SIZE, Training, planned_passes, run_ahead_on_double
from logs import logged

import torch_ring as hvd

pytestmark = device_double.needed


def drift(device: str, odd: int | None) -> tuple[list[str], list[int]]:
    """Rank `odd` writes into a weight in step 5."""
    training = Training(device)
    with logged() as messages, planned_passes() as numbers:
        for step in range(40):
            if step == 5 and hvd.rank() == odd:
                training.model.trunk.bias.data += 1
            training.step()
    return messages, numbers


@pytest.mark.parametrize("odd", [0, 1])
def test_drift_is_told(odd):
    (first, numbers), *others = run_ahead_on_double(functools.partial(drift, odd=odd), SIZE)
    (message,) = first
    assert message.startswith(
        f"after step 10 the ranks train different weights: 'trunk.bias' on rank {odd} is not "
        f"that on rank {1 - odd} (1 of "
    )
    assert "after step 1 all had the same" in message
    assert [messages for messages, _ in others] == [[]] * (SIZE - 1)
    # The details are gathered in an agreed pass; then the passes are planned again.
    agreed = sorted(set(range(PLANNED, 40)).difference(numbers))
    assert agreed
    assert len(agreed) < 10
    assert all(theirs == numbers for _, theirs in others)


def test_equal_weights_end_no_plan():
    for messages, numbers in run_ahead_on_double(functools.partial(drift, odd=None), SIZE):
        assert messages == []
        # Before the plan, a step agrees on the branch that has no gradient, and counts as a pass.
        assert numbers == list(range(PLANNED + 1, 40 + 1))
