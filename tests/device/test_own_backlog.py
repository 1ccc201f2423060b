# SPDX-License-Identifier: Apache-2.0
"""A device that still runs the program's own work has not got to a collective: nobody is late."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path

import device_double
import pytest
import torch
from device_runs import run_on_double
from logs import logged
from pool import all_have_passed, error_of, eventually

import torch_ring as hvd

TIMEOUT_S, WARNING_S = 2.0, 0.25
OWN = "this rank's device has not got to it yet"
OTHER = "another rank's device does not get to it"
# So many warnings of one device come after the timeout, and after the second that shutdown() adds.
ENOUGH = int((TIMEOUT_S + 1) / WARNING_S) + 4

run = functools.partial(
    run_on_double,
    TORCH_RING_TIMEOUT=str(TIMEOUT_S),
    TORCH_RING_STALL_WARNING=str(WARNING_S),
)


def behind_own_work(passed: Path, meanwhile: Callable[[], object], device: str) -> None:
    """All devices have work to do that takes longer than the timeout."""
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    size = hvd.size()
    gate = torch.ops.ringdouble.close_gate()

    def open_late() -> None:
        assert eventually(lambda: sum(OWN in message for message in messages) >= ENOUGH)
        all_have_passed(passed, size)
        torch.ops.ringdouble.open_gate(gate)

    with logged() as messages:
        result = hvd.allreduce(mine, op=hvd.Sum)
        thread = threading.Thread(target=open_late)
        thread.start()
        meanwhile()
        thread.join()
        assert result.tolist() == [size] * 3


def go_on() -> None:
    """Call nothing: the result waits for the device."""


@pytest.mark.parametrize("meanwhile", [go_on, hvd.shutdown])
def test_a_timeout_does_not_count_own_work(meanwhile, tmp_path):
    run(functools.partial(behind_own_work, tmp_path / "passed", meanwhile), 2)


def behind_the_work_of_another_rank(device: str) -> tuple[str, str]:
    """The device of rank 1 alone has work to do: the others' devices wait for it."""
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    gate = torch.ops.ringdouble.close_gate() if hvd.rank() == 1 else None

    def until_noticed() -> None:
        while True:
            hvd.allreduce(torch.ones(3))

    with logged() as messages:
        hvd.allreduce_async_(mine)
        failure = error_of(until_noticed)
        if gate is not None:
            torch.ops.ringdouble.open_gate(gate)
    assert any((OWN if hvd.rank() == 1 else OTHER) in message for message in messages), messages
    return failure


def test_a_timeout_counts_the_work_of_another_rank():
    for kind, text in run(behind_the_work_of_another_rank, 2):
        assert kind == "TimeoutError"
        assert f"a collective on {device_double.DEVICE}:0 has not ended within 2 s: {OTHER}" in text
