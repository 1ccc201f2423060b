# SPDX-License-Identifier: Apache-2.0
"""Faults of csrc/collective: the plans of rings and trees, and their data."""

from __future__ import annotations

from faults.fault import Fault, Room

PLAN = "csrc/collective/plan.cc"
RING = "csrc/collective/ring_communicator.cc"

# fmt: off
FAULTS = (
    Fault(
        "wrong_chunk", "a ring receives the chunk that it has sent", PLAN,
        "around(rank, -1 - step, size)", "around(rank, -step, size)",
        tests=("cpp:ring with checksums x3",),
    ),
    Fault(
        "row_for_column", "a rank receives as many bytes as it sends", PLAN,
        "at(matrix, from * size + to)", "at(matrix, to * size + from)",
        tests=("cpp:ring with checksums x3",),
    ),
    Fault(
        "own_order_of_inputs", "each rank adds the inputs in an order of its own", RING,
        "(i + ranks - static_cast<std::size_t>(rank())) % ranks * bytes", "i * bytes",
        tests=("cpp:ring with checksums x3",),
    ),
    Fault(
        "roots_part_missing", "the root of a gather lacks its own part", RING,
        "std::memcpy(bytes_of(output) + own.begin, input, own.count);",
        tests=("cpp:ring with checksums x3",),
    ),
    Fault(
        "own_rows_missing", "a rank lacks the rows that an alltoall sends to itself", RING,
        "std::memcpy(bytes_of(output) + arriving[own].begin, "
        "bytes_of(input) + parts[own].begin,\n                parts[own].count);",
        tests=("cpp:ring with checksums x3",),
    ),
    Fault(
        "own_input_missing", "a rank's own part of an allgather is not copied", RING,
        "if (to != input && own.count > 0) std::memcpy(to, input, own.count);",
        tests=("cpp:ring with checksums x3",),
    ),
    Fault(
        "rotated_unrotated", "a tree counts ranks from 0, not from the root", PLAN,
        "around(root, peer, size)", "peer",
        tests=("cpp:plan_tree",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/collectives", "tests/world"))
