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
from zoo import Strided, Tied, net

import torch_ring as hvd

SMALL_BUCKETS = {"TORCH_RING_BUCKET_BYTES": "256"}
SOME_DIRECT = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "512"}  # half of the gradients lie in blocks
OPS = [hvd.Average, hvd.Sum]


@pytest.mark.parametrize("kind", programs.OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3])
@on_both_transports
def test_the_loop_of_every_tutorial(transport: str, size: int, kind: str) -> None:
    for set_to_none in (True, False):
        args = kind, net, set_to_none
        expect_one_process(programs.plain, *args, size=size, transport=transport)


@pytest.mark.parametrize("make", [net, Tied, Strided])
@pytest.mark.parametrize("size", [2, 3])
@on_both_transports
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
    (programs.looking_ahead, "momentum", False),
    (programs.on_given_memory, "assigned"),
    (programs.flat, programs.in_a_row, hvd.Sum, 2),
    (programs.added_later,),
]
AGREED = [
    *AHEAD,
    (programs.clipped, "synchronize"),
    (programs.accumulated, "synchronize"),
    (programs.by_closures, "lbfgs with a search"),
    (programs.skipped,),
    (programs.checkpointed, True),
    *[
        (programs.in_segments_and_outside, how, op, 2)
        for how in ("always", "late", "on one rank", "in turns", "on zeros")
        for op in OPS
    ],
    (programs.converted, programs.there_and_back, hvd.Sum),
    (programs.converted, programs.by_data, hvd.Average),
    (programs.on_other_memory, "data before zero_grad"),
]


def name_of(case: object) -> str:
    if isinstance(case, tuple):
        return "-".join(str(getattr(each, "__name__", each)) for each in case)
    return {"0": "agreed", "1": "ahead"}[str(case)]


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


SHARDED = [
    (programs.plain, "momentum"),
    (programs.clipped, "synchronize"),
    (programs.scheduled, True),
    (programs.scheduled, False),
    (programs.by_closures, "momentum"),
    (programs.overflowing, False),
    (programs.overflowing, True),
    (programs.skipped,),
    (programs.frozen_and_thawed,),
    (programs.accumulated, "passes"),
    (programs.adversaries,),
    (programs.looking_ahead, "momentum", False),
]


@pytest.mark.parametrize("case", SHARDED, ids=name_of)
@on_both_transports
def test_a_sharded_state(transport: str, case: tuple[Any, ...]) -> None:
    expect_one_process(*case, size=3, transport=transport, door="sharded")


HABITS = [
    (programs.plain, "adam"),
    *[(programs.plain, "momentum", make) for make in (Tied, Strided)],
    *[(programs.by_closures, kind) for kind in programs.BY_CLOSURES],
    *[
        (programs.clipped, how)
        for how in ("step", "synchronize", "synchronize twice", "skip_synchronize")
    ],
    *[(programs.scheduled, attach_first) for attach_first in (True, False)],
    (programs.scaled_sparse_losses,),
    (programs.skipped,),
    (programs.frozen_and_thawed,),
    *[(programs.quantised, groups) for groups in (None, "all", 1)],
    *[(programs.checkpointed, use_reentrant) for use_reentrant in (True, False)],
    (programs.contrastive, programs.clip, "grouped"),
    (programs.contrastive, programs.simclr, "one by one"),
    (programs.contrastive, programs.clip, "as in Horovod"),
    (programs.contrastive, programs.clip_of_own_rows, "grouped"),
    *[
        (programs.converted, convert, op)
        for convert in (programs.there_and_back, programs.by_data)
        for op in OPS
    ],
    *[(programs.accumulated, how) for how in ("passes", "no_sync", "synchronize")],
    (programs.adversaries,),
    (programs.compiled, "aot_eager"),
    slow((programs.compiled, "inductor")),
    (programs.added_later,),
    (programs.run_out, 0, {"groups": 2}),
    (programs.penalised,),
    *[(programs.looking_ahead, "momentum", set_to_none) for set_to_none in (True, False)],
    *[slow((programs.looking_ahead, "adam", set_to_none)) for set_to_none in (True, False)],
]


@pytest.mark.parametrize("case", HABITS, ids=name_of)
@pytest.mark.parametrize(
    ("transport", "size", "env"), [("shm", 2, {}), ("tcp", 3, SMALL_BUCKETS)], ids=["shm", "tcp"]
)
def test_habits(transport: str, size: int, env: dict[str, str], case: tuple[Any, ...]) -> None:
    expect_one_process(*case, size=size, transport=transport, env=env)


OWN_MEMORY = [
    *[
        (programs.on_other_memory, how)
        for how in ("data", "data before zero_grad", "share_memory", "by a hook", "in the pass")
    ],
    *[(programs.on_other_memory, how) for how in ("between passes", "by halves")],
    *[(programs.on_given_memory, how) for how in ("assigned", "data", "by hand")],
    *[(programs.flat, lay, op, n) for lay in programs.LAYS for op in OPS for n in (1, 2, 0)],
]


@pytest.mark.parametrize("case", OWN_MEMORY, ids=name_of)
@on_both_transports
def test_gradients_in_memory_of_the_program(transport: str, case: tuple[Any, ...]) -> None:
    expect_one_process(*case, transport=transport, env=SOME_DIRECT)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"op": hvd.Sum},
        {"sparse_as_dense": True},
        {"sparse_as_dense": True, "op": hvd.Sum},
        {"backward_passes_per_step": 2},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=",".join,
)
@pytest.mark.parametrize(("transport", "size"), [("shm", 3), ("tcp", 2)])
def test_sparse_gradients(transport: str, size: int, options: dict[str, Any]) -> None:
    expect_one_process(programs.sparse, options, size=size, transport=transport)


@on_both_transports
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("nested_twice", [False, True], ids=["", "nested twice"])
@pytest.mark.parametrize("split", [False, True], ids=["one optimizer", "two optimizers"])
def test_a_layer_in_two_segments(
    transport: str, passes: int, nested_twice: bool, split: bool
) -> None:
    args = passes, nested_twice, split
    expect_one_process(programs.in_segments, *args, transport=transport, env=SMALL_BUCKETS)


@pytest.mark.parametrize(("transport", "size", "op"), [("shm", 2, OPS[0]), ("tcp", 3, OPS[1])])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "how", ["always", "late", "on one rank", "in turns", "on zeros", "in the program's memory"]
)
def test_a_layer_outside_of_segments_and_inside(
    transport: str, size: int, op: hvd.ReduceOp, passes: int, how: str
) -> None:
    program, args = programs.in_segments_and_outside, (how, op, passes)
    expect_one_process(program, *args, size=size, transport=transport, env=SMALL_BUCKETS)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("transport", "passes", "synchronised"),
    [("shm", 1, 1), ("tcp", 2, 1), ("tcp", 2, 2), ("shm", 1, 2)],
)
def test_a_shared_trunk(transport: str, passes: int, synchronised: int, op: hvd.ReduceOp) -> None:
    for zero in ("to none", "to zero", "by the model"):
        args = op, passes, synchronised, zero
        expect_one_process(programs.actor_and_critic, *args, size=3, transport=transport)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("stepping", "passes"), [(0, 2), (1, 1)])
@on_both_transports
def test_one_of_two_optimizers(
    transport: str, stepping: int, passes: int, op: hvd.ReduceOp
) -> None:
    args = op, stepping, passes
    expect_one_process(programs.wrapped_twice, *args, size=3, transport=transport)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("tcp", 3)])
def test_ranks_run_out_of_batches(transport: str, size: int, first: int) -> None:
    expect_one_process(programs.run_out, first, {}, size=size, transport=transport)


NEW, WRITTEN = (
    [programs.assigned, programs.added],
    [programs.filled, programs.filled_by_data, programs.filled_by_numpy],
)


@pytest.mark.parametrize(
    ("assign", "zero"),
    [
        *((assign, "to none") for assign in (*NEW, *WRITTEN)),
        *((assign, "to zero") for assign in WRITTEN),
        *((assign, "never") for assign in WRITTEN),
    ],
)
@pytest.mark.parametrize(("transport", "op"), [("shm", OPS[0]), ("tcp", OPS[1])])
def test_gradients_set_beside_backward(
    transport: str, op: hvd.ReduceOp, assign: Any, zero: str
) -> None:
    options = {"op": hvd.Average if zero == "never" else op}
    for first in (True, False) if zero == "never" or assign in NEW else (False,):
        for setting in [(0, 1, 2)] if zero == "never" else [(0, 1, 2), (1,)]:
            args = assign, first, setting, zero, options
            expect_one_process(programs.set_by_hand, *args, size=3, transport=transport)


@pytest.mark.parametrize(
    "options",
    [
        {"backward_passes_per_step": 2},
        {"compression": hvd.Compression.fp16},
        {"groups": 2},
        {"sparse_as_dense": True},
    ],
    ids=",".join,
)
@on_both_transports
def test_gradients_set_beside_backward_with(transport: str, options: dict[str, Any]) -> None:
    args = programs.assigned, True, (0, 1), "to none", options
    expect_one_process(programs.set_by_hand, *args, transport=transport)


@pytest.mark.parametrize("first", range(10))
def test_habits_at_random(first: int, full: bool) -> None:
    """`--full` plays thousands of programs; a failure names its seed."""
    for seed in range(first, 4000 if full else 40, 10):
        size, transport = (3, "tcp") if seed % 2 else (2, "shm")
        expect_one_process(habits.at_random, seed, size=size, transport=transport)
