# SPDX-License-Identifier: Apache-2.0
"""Each training program, on ranks and in one process: transports, sizes and doors."""

from __future__ import annotations

from typing import Any

import device_double
import habits
import programs
import pytest
from oracle import expect_one_process
from slow import slow
from worlds import on_both_transports
from zoo import Recomputed, Strided, Tied, net

import torch_ring as hvd

SMALL_BUCKETS = {"TORCH_RING_BUCKET_BYTES": "256"}
SOME_DIRECT = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "512"}  # half of the gradients lie in blocks
WORLDS = {"shm": (2, SOME_DIRECT), "tcp": (3, SMALL_BUCKETS)}  # the size, and settings
AVERAGE, SUM = hvd.Average, hvd.Sum


def name_of(case: object) -> str:
    if isinstance(case, tuple):
        return "-".join(str(getattr(each, "__name__", each)) for each in case)
    return {"0": "agreed", "1": "ahead"}.get(str(case), str(case))


def on_transports_in_turn(cases: list[Any]) -> pytest.MarkDecorator:
    """Run each case on one transport, in turn, and slowly on the other one."""
    rows = []
    for number, case in enumerate(cases):
        first, second = ("shm", "tcp") if number % 2 else ("tcp", "shm")
        rows += [(first, case), slow(second, case)]
    return pytest.mark.parametrize(("transport", "case"), rows, ids=name_of)


@pytest.mark.parametrize(
    ("transport", "size"), [("shm", 1), ("shm", 2), ("shm", 3), ("tcp", 2), ("tcp", 3)]
)
def test_the_loop_of_every_tutorial(transport: str, size: int) -> None:
    for kind, set_to_none in (("sgd", True), ("momentum", False)):
        args = kind, net, set_to_none
        expect_one_process(programs.plain, *args, size=size, transport=transport)


@pytest.mark.parametrize(
    ("transport", "size", "make"), [("shm", 3, net), ("shm", 2, Strided), ("tcp", 3, Tied)]
)
def test_ddp(transport: str, size: int, make: Any) -> None:
    expect_one_process(programs.plain, "momentum", make, size=size, transport=transport, door="ddp")


# On a device hosts may run ahead of one another, if their ranks have gradients of the same weights.
AHEAD = [
    (programs.plain, "adam"),
    (programs.clipped, "step"),
    (programs.clipped, "skip_synchronize"),
    (programs.scheduled, True),
    (programs.overflowing, False),
    (programs.frozen_and_thawed,),
    (programs.in_segments, 2, True, True),
    (programs.accumulated, "passes"),
    (programs.accumulated, "no_sync"),
    (programs.adversaries,),
    (programs.on_given_memory, "assigned"),
    (programs.flat, programs.in_a_row, SUM, 2),
    (programs.added_later, False),
]
AGREED = [
    *AHEAD,
    (programs.clipped, "synchronize twice"),
    (programs.accumulated, "synchronize"),
    (programs.by_closures, "lbfgs with a search"),
    (programs.skipped,),
    (programs.in_segments_and_outside, "always", AVERAGE, 1),
    (programs.in_segments_and_outside, "late", SUM, 2),
    (programs.in_segments_and_outside, "on one rank", AVERAGE, 2),
    (programs.in_segments_and_outside, "in turns", SUM, 1),
    (programs.in_segments_and_outside, "on zeros", AVERAGE, 2),
    (programs.converted, programs.there_and_back, SUM),
    (programs.converted, programs.by_data, AVERAGE),
    (programs.on_other_memory, "data before zero_grad"),
]


@device_double.needed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead", "case"),
    [*(("0", case) for case in AGREED), *(("1", case) for case in AHEAD)],
    ids=name_of,
)
@on_both_transports
def test_a_device(transport: str, ahead: str, case: tuple[Any, ...]) -> None:
    env = {"TORCH_RING_RUN_AHEAD": ahead, **SMALL_BUCKETS}
    expect_one_process(*case, size=3, transport=transport, door="device", env=env)


@on_transports_in_turn(
    [
        (programs.plain, "momentum"),
        (programs.clipped, "synchronize twice"),
        (programs.scheduled, True),
        (programs.scheduled, False),
        (programs.by_closures, "momentum"),
        (programs.overflowing, False),
        (programs.overflowing, True),
        (programs.skipped,),
        (programs.frozen_and_thawed,),
        (programs.accumulated, "passes"),
        (programs.adversaries,),
        (programs.on_other_memory, "share_memory"),
        (programs.on_other_memory, "data"),
    ]
)
def test_a_sharded_state(transport: str, case: tuple[Any, ...]) -> None:
    expect_one_process(*case, size=3, transport=transport, door="sharded")


HABITS = [
    *AGREED,
    *[(programs.plain, "momentum", make) for make in (Tied, Strided, Recomputed)],
    (programs.added_later, True),
    (programs.by_closures, "momentum"),
    (programs.overflowing, False),
    (programs.scheduled, False),
    *[(programs.quantised, groups) for groups in (None, "all")],
    (programs.contrastive,),
    *[(programs.run_out, first, {}) for first in (0, 1)],
    (programs.run_out, 0, {"groups": 2}),
    (programs.penalised,),
    (programs.in_segments, 1, False, False),
    (programs.in_segments, 1, True, False),
    (programs.in_segments, 1, False, True),
    (programs.in_segments_and_outside, "in the program's memory", SUM, 2),
    *[
        (programs.sparse, options)
        for options in (
            {},
            {"op": SUM, "sparse_as_dense": True},
            {"backward_passes_per_step": 2},
            {"gradient_predivide_factor": 2.0},
        )
    ],
]


@on_transports_in_turn(HABITS)
def test_habits(transport: str, case: tuple[Any, ...]) -> None:
    size, env = WORLDS[transport]
    expect_one_process(*case, size=size, transport=transport, env=env)


@pytest.mark.parametrize(
    "case",
    [
        *[
            (programs.on_other_memory, how)
            for how in ("data", "share_memory", "by a hook", "in the pass", "between passes")
        ],
        (programs.on_other_memory, "by halves"),
        (programs.on_given_memory, "data"),
        *[(programs.flat, lay, AVERAGE, 1) for lay in programs.LAYS],
        *[(programs.flat, lay, SUM, 0) for lay in programs.LAYS],
    ],
    ids=name_of,
)
@on_both_transports
def test_gradients_in_memory_of_the_program(transport: str, case: tuple[Any, ...]) -> None:
    expect_one_process(*case, transport=transport, env=SOME_DIRECT)


@pytest.mark.weekly
def test_inductor() -> None:
    expect_one_process(programs.compiled, "inductor", deadline_s=300)


@pytest.mark.parametrize(
    ("transport", "args"),
    [
        ("shm", (AVERAGE, 1, 1, "to none")),
        ("shm", (SUM, 1, 2, "to zero")),
        ("tcp", (SUM, 2, 1, "by the model")),
        ("tcp", (AVERAGE, 2, 2, "to zero")),
    ],
)
def test_a_shared_trunk(transport: str, args: tuple[Any, ...]) -> None:
    expect_one_process(programs.actor_and_critic, *args, size=3, transport=transport)


@pytest.mark.parametrize(
    ("transport", "args"),
    [
        *[("shm", args) for args in ((AVERAGE, 0, 2), (SUM, 1, 1))],
        *[("tcp", args) for args in ((SUM, 0, 2), (AVERAGE, 1, 1))],
    ],
)
def test_one_of_two_optimizers(transport: str, args: tuple[Any, ...]) -> None:
    expect_one_process(programs.wrapped_twice, *args, size=3, transport=transport)


@on_transports_in_turn(
    [
        (programs.assigned, True, (0, 1, 2), "to none", {}),
        (programs.assigned, False, (1,), "to none", {"op": SUM}),
        (programs.added, True, (1,), "to none", {"op": SUM}),
        (programs.added, False, (0, 1, 2), "to none", {}),
        (programs.filled, False, (1,), "to none", {}),
        (programs.filled, False, (0, 1, 2), "to zero", {"op": SUM}),
        (programs.filled, True, (0, 1, 2), "never", {}),
        (programs.filled_by_data, False, (1,), "to zero", {}),
        (programs.filled_by_data, True, (0, 1, 2), "never", {}),
        (programs.filled_by_numpy, False, (0, 1, 2), "to zero", {"op": SUM}),
        (programs.filled_by_numpy, False, (0, 1, 2), "never", {}),
        (programs.assigned, True, (0, 1), "to none", {"backward_passes_per_step": 2}),
    ]
)
def test_gradients_set_beside_backward(transport: str, case: tuple[Any, ...]) -> None:
    expect_one_process(programs.set_by_hand, *case, size=3, transport=transport)


@pytest.mark.parametrize("first", [0, 1, 2, 3, *map(slow, range(4, 10))])
def test_habits_at_random(first: int, full: bool) -> None:
    """`--full` plays thousands of programs; a failure names its seed."""
    for seed in range(first, 4000 if full else 40, 10):
        size, transport = (3, "tcp") if seed % 2 else (2, "shm")
        expect_one_process(habits.at_random, seed, size=size, transport=transport)
