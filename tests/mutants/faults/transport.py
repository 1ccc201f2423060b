"""Faults of csrc/transport: handshakes, checksums, shared memory, long waits."""

from __future__ import annotations

from faults.fault import Fault, Room

HANDSHAKE = "csrc/transport/handshake.cc"
CHECKED = "csrc/transport/checked_stream.cc"
ARENA = "csrc/transport/shared_arena.cc"
WAITS = "csrc/transport/wait_graph.h"

# fmt: off
FAULTS = (
    Fault(
        "proof_unchecked", "who does not know the secret may connect", HANDSHAKE,
        "!equal_in_constant_time(incoming_, proof_of(kConnects))", "false",
        tests=("setup/test_connect.py",),
    ),
    Fault(
        "verdict_believed", "a rank connects to one that does not know the secret", HANDSHAKE,
        "message.verdict == kRefusal || !equal_in_constant_time(message.proof, proof_of(kAccepts))",
        "message.verdict == kRefusal",
        tests=("setup/test_connect.py",),
    ),
    Fault(
        "replayed", "a handshake may be replayed", HANDSHAKE,
        "nonce_ = random_nonce();", "nonce_ = Sha256{};",
        tests=("setup/test_connect.py",),
    ),
    Fault(
        "other_rank_connected", "a connection to another rank is taken", HANDSHAKE,
        "message.to != rank || message.from == rank", "false",
        tests=("setup/test_connect.py",),
    ),
    Fault(
        "flipped_bit", "a flipped bit is not noticed", CHECKED,
        "frame_.left > 0 || crc_ == expected_", "true",
        tests=("world/test_checksums.py",),
    ),
    Fault(
        "flipped_length", "a flipped bit in a frame's length is not noticed", CHECKED,
        "crc32c(checked) != header_crc || bytes == 0", "bytes == 0",
        tests=("world/test_checksums.py",),
    ),
    Fault(
        "slot_not_freed", "the memory of a removed set stays in use", ARENA,
        "memory_->release(slot, Slot::kBytes);\n  give_back(used);",
        tests=("world/test_process_sets.py", "c10d/test_groups.py"),
    ),
    Fault(
        "departed_awaited", "the last data of a rank that has left are awaited for ever", WAITS,
        "now - departed_since_ < graph_->patience_with_departed()", "true",
        tests=("world/test_failures.py",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/world", "tests/setup"))
