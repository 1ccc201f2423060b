"""Events in the middle of training on a stand-in for a device, with hosts that run ahead or not."""

from __future__ import annotations

import functools

import device_double
import pytest
from device_runs import run_on_double
from hostile_events import EVENTS

pytestmark = device_double.needed


@pytest.mark.parametrize("run_ahead", [False, True], ids=["agreed", "ahead"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_an_event(event, size, run_ahead):
    program = functools.partial(event, run_ahead=run_ahead)
    run_on_double(program, size, TORCH_RING_BUCKET_BYTES="1")
