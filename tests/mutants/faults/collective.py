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
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "row_for_column", "a rank receives as many bytes as it sends", PLAN,
        "at(matrix, from * size + to)", "at(matrix, to * size + from)",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "own_order", "each rank adds the inputs in an order of its own", RING,
        "(i + ranks - static_cast<std::size_t>(rank())) % ranks * bytes", "i * bytes",
        tests=("collectives/test_every_collective.py", "world/test_same_bits.py"),
    ),
    Fault(
        "roots_part_missing", "the root of a gather lacks its own part", RING,
        "std::memcpy(bytes_of(output) + own.begin, input, own.count);",
        tests=("c10d/test_operations.py",),
    ),
    Fault(
        "own_rows_missing", "a rank lacks the rows that an alltoall sends to itself", RING,
        "std::memcpy(bytes_of(output) + arriving[own].begin, "
        "bytes_of(input) + parts[own].begin,\n                parts[own].count);",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "own_input_missing", "a rank's own part of an allgather is not copied", RING,
        "if (to != input && own.count > 0) std::memcpy(to, input, own.count);",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "rotated_unrotated", "a tree counts ranks from 0, not from the root", PLAN,
        "around(root, peer, size)", "peer",
        tests=("collectives/test_every_collective.py", "world/test_rooted_on_hosts.py"),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/collectives", "tests/world"))
