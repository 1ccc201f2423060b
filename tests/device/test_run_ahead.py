"""Planned passes, on stand-ins for a GPU and for NCCL: same weights as with run_ahead=False."""

from __future__ import annotations

import functools

import device_double
import device_runs
import pytest
import torch
from ahead_programs import PROGRAMS, Program, branch_out, planned_passes, same_branches
from training import assert_same_on_all_ranks

pytestmark = device_double.needed
run_on_double = functools.partial(device_runs.run_on_double, TORCH_RING_RUN_AHEAD="1")
on_worlds = pytest.mark.parametrize("size", [2, 3])


def compare(program: Program, device: str) -> None:
    """Run a program in planned passes and in agreed ones; compare bit by bit."""
    with planned_passes() as numbers:
        agreed = program(device, False)
        assert numbers == []
        ahead = program(device, True)
    assert len(numbers) >= 3
    assert_same_on_all_ranks(*ahead)
    for mine, other in zip(ahead, agreed, strict=True):
        assert torch.equal(mine, other)


@on_worlds
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_weights_are_those_of_agreed_passes(program, size):
    run_on_double(functools.partial(compare, program), size)


@pytest.mark.parametrize("bucket_bytes", ["1", "100"])
def test_weights_with_many_buckets(bucket_bytes):
    for program in PROGRAMS[:4]:
        run_on_double(functools.partial(compare, program), 2, TORCH_RING_BUCKET_BYTES=bucket_bytes)


def count_planned(device: str) -> list[int]:
    with planned_passes() as numbers:
        same_branches(device, None)
    return numbers


@on_worlds
def test_three_equal_passes_are_agreed(size):
    assert run_on_double(count_planned, size) == [list(range(3, 14))] * size


def count_while_changing(device: str) -> list[int]:
    """No rank uses a branch in passes 6 to 15, and all do in the others."""
    with planned_passes() as numbers:
        branch_out(device, None, lambda step: (0,) if 6 <= step < 16 else (0, 1), steps=30)
    return numbers


@on_worlds
def test_programs_that_change_are_agreed_longer(size):
    """Four passes without the branch end a plan, its return at once; the next one takes longer."""
    agreed = {0, 1, 2, 10, *range(17, 25)}
    planned = [step for step in range(30) if step not in agreed]
    assert run_on_double(count_while_changing, size) == [planned] * size


def test_the_variable_makes_all_passes_agreed():
    assert run_on_double(count_planned, 2, TORCH_RING_RUN_AHEAD="0") == [[], []]
