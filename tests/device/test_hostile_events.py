"""Events in the middle of training on a stand-in for a device, with hosts that run ahead or not."""

from __future__ import annotations

import functools

import device_double
import pytest
from device_runs import run_on_double
from hostile_events import EVENTS, add_a_process_set, wait_elsewhere
from program_runs import both_ways

pytestmark = [device_double.needed, pytest.mark.slow]


@both_ways
@pytest.mark.parametrize(
    ("event", "size"),
    # With two ranks, the added set has one.
    [*((event, 3) for event in EVENTS), (add_a_process_set, 2)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_event(event, size, run_ahead):
    program = functools.partial(event, run_ahead=run_ahead)
    # If hosts run ahead, only the timeout ends one of the events.
    timeout = "5" if run_ahead and event is wait_elsewhere else "20"
    run_on_double(program, size, TORCH_RING_BUCKET_BYTES="1", TORCH_RING_TIMEOUT=timeout)
