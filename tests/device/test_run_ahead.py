# SPDX-License-Identifier: Apache-2.0
"""Planned passes: which ones they are, their records, and weights that drift apart in them.

`test_random_device_programs.py` has their results.
"""

from __future__ import annotations

import functools
from pathlib import Path

from ahead_training import PLANNED, SIZE, Training, planned_passes, run_ahead_on_double
from device_runs import run_on_double
from logs import logged
from pool import eventually

import torch_ring as hvd
from tests.tracing.test_flight_recorder import analysed, entries
from torch_ring import tracing
from torch_ring.world import current

STEPS = 14


def count_planned(device: str) -> list[int]:
    with planned_passes() as numbers:
        training = Training(device, run_ahead=None)
        for _ in range(STEPS):
            training.step(0, 1, 2)
    return numbers


def test_no_pass_is_planned_by_the_setting():
    assert run_on_double(count_planned, SIZE, TORCH_RING_RUN_AHEAD="0") == [[]] * SIZE


def count_while_changing(device: str) -> list[int]:
    """No rank uses a branch in passes 6 to 15, and all do in the others."""
    with planned_passes() as numbers:
        training = Training(device, run_ahead=None)
        for step in range(30):
            training.step(*(0,) if 6 <= step < 16 else (0, 1))
    return numbers


def test_two_equal_passes_make_a_plan_and_a_changed_one_ends_it():
    """A pass without the branch ends a plan, and so does its return.

    The passes of steps 0, 1, 7, 8, 17 and 18 are agreed. Where no plan follows, the step agrees
    once more, on the third branch, which has no gradient: that counts as a pass.
    """
    planned = [*range(3, 8), *range(11, 19), *range(22, 33)]
    assert run_on_double(count_while_changing, SIZE) == [planned] * SIZE


def dump_planned_passes(folder: Path, device: str) -> int:
    numbers = count_planned(device)
    hvd.barrier()  # by then the reports of the last passes have been sent, too
    assert eventually(lambda: all(r.finished_ns for r in current.engine().records()), 30.0)
    tracing.dump(folder)
    return len(numbers)


def test_launches_are_in_the_flight_recorder(tmp_path: Path) -> None:
    size = 2
    passes = run_ahead_on_double(functools.partial(dump_planned_passes, tmp_path), size)[0]
    text = analysed(tmp_path)
    assert "Not all ranks" not in text, text
    assert "errors" not in text, text
    launched = [
        [e for e in entries(tmp_path, rank) if e["ring"]["is_launched"]] for rank in range(size)
    ]
    for entry, *others in zip(*launched, strict=True):
        assert entry["profiling_name"] == "nccl:all_reduce"
        assert entry["state"] == "completed"
        for other in others:
            assert other["input_sizes"] == entry["input_sizes"]
            assert other["collective_seq_id"] == entry["collective_seq_id"]
    numbers = [entry["collective_seq_id"] for entry in launched[0]]
    assert numbers == [2**44 + i for i in range(1, len(numbers) + 1)]
    assert len(numbers) >= passes > 0


def drift(device: str) -> tuple[list[str], list[int]]:
    """Rank 1 writes into a weight in step 5."""
    training = Training(device)
    with logged() as messages, planned_passes() as numbers:
        for step in range(40):
            if step == 5 and hvd.rank() == 1:
                training.model.trunk.bias.data += 1
            training.step()
    return messages, numbers


def test_drift_is_told():
    (first, numbers), *others = run_ahead_on_double(drift, SIZE)
    (message,) = first
    assert message.startswith(
        "after step 10 the ranks train different weights: 'trunk.bias' on rank 1 is not that on "
        "rank 0 (1 of "
    )
    assert "after step 1 all had the same" in message
    # The details are gathered in an agreed pass; then the passes are planned again.
    agreed = set(range(PLANNED, 40)).difference(numbers)
    assert 0 < len(agreed) < 10
    assert others == [([], numbers)] * (SIZE - 1)
