"""Planned passes, on stand-ins for a GPU and for NCCL: same weights as with run_ahead=False."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path

import device_double
import device_runs
import pytest
import torch
from ahead_programs import (
    PROGRAMS,
    Program,
    branch_out,
    planned_passes,
    same_branches,
)
from pool import eventually
from training import assert_same_on_all_ranks

import torch_ring as hvd
from tests.tracing.test_flight_recorder import analysed, entries
from torch_ring import tracing
from torch_ring.world import current

pytestmark = device_double.needed
run_on_double = functools.partial(device_runs.run_on_double, TORCH_RING_RUN_AHEAD="1")


def compare(program: Program, device: str) -> None:
    """Run a program in planned passes and in agreed ones, which may send other sizes at a time.

    NCCL adds three numbers in another order for another size.
    """
    with planned_passes() as numbers:
        agreed = program(device, False)
        assert numbers == []
        ahead = program(device, True)
    assert len(numbers) >= 3
    assert_same_on_all_ranks(*ahead)
    for mine, other in zip(ahead, agreed, strict=True):
        exact = {"rtol": 0, "atol": 0} if hvd.size() == 2 else {}
        torch.testing.assert_close(mine, other, **exact)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_weights_are_those_of_agreed_passes(program):
    run_on_double(functools.partial(compare, program), 3)


@pytest.mark.parametrize("bucket_bytes", ["1", "100"])
def test_weights_with_many_buckets(bucket_bytes):
    for program in PROGRAMS[:4]:
        run_on_double(functools.partial(compare, program), 2, TORCH_RING_BUCKET_BYTES=bucket_bytes)


def count_planned(device: str) -> list[int]:
    with planned_passes() as numbers:
        same_branches(device, None)
    return numbers


def test_two_equal_passes_are_agreed():
    assert run_on_double(count_planned, 3) == [list(range(2, 14))] * 3


def count_while_changing(device: str) -> list[int]:
    """No rank uses a branch in passes 6 to 15, and all do in the others."""
    with planned_passes() as numbers:
        branch_out(device, None, lambda step: (0,) if 6 <= step < 16 else (0, 1), steps=30)
    return numbers


def test_a_changed_pass_ends_a_plan_and_two_make_the_next():
    """A pass without the branch ends a plan, and so does its return.

    The passes of steps 0, 1, 7, 8, 17 and 18 are agreed. Where no plan follows, the step agrees
    once more, on the third branch, which has no gradient: that counts as a pass.
    """
    planned = [*range(3, 8), *range(11, 19), *range(22, 33)]
    assert run_on_double(count_while_changing, 3) == [planned] * 3


def test_the_variable_makes_all_passes_agreed():
    assert run_on_double(count_planned, 2, TORCH_RING_RUN_AHEAD="0") == [[], []]


def test_passes_on_a_device_are_planned_without_a_setting():
    assert device_runs.run_on_double(count_planned, 2) == [list(range(2, 14))] * 2


def dump_planned_passes(folder: Path, device: str) -> int:
    with planned_passes() as numbers:
        same_branches(device, None)
    hvd.barrier()  # by then the reports of the last passes have been sent, too
    assert eventually(lambda: all(r.finished_ns for r in current.engine().records()), 30.0)
    tracing.dump(folder)
    return len(numbers)


def test_launches_are_in_the_flight_recorder(tmp_path: Path) -> None:
    size = 2
    passes = run_on_double(functools.partial(dump_planned_passes, tmp_path), size)[0]
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
    for path in tmp_path.iterdir():  # a rank that has launched less than the others
        content = pickle.loads(path.read_bytes())
        if path.name == "flight_1":
            content["entries"].remove(max(content["entries"], key=lambda e: e["collective_seq_id"]))
        path.write_bytes(pickle.dumps(content))
    assert "Not all ranks joining collective" in analysed(tmp_path)
