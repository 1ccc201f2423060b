# SPDX-License-Identifier: Apache-2.0
"""Faults of csrc/transport: handshakes, checksums, shared memory, long waits."""

from __future__ import annotations

from faults.fault import Fault, Room

HANDSHAKE = "csrc/transport/handshake.cc"
CHECKED = "csrc/transport/checked_stream.cc"
ARENA = "csrc/transport/shared_arena.cc"
WAITS = "csrc/transport/wait_graph.h"
TLS = "csrc/transport/tls.cc"
CONNECTION = "csrc/transport/connection.cc"

# fmt: off
FAULTS = (
    Fault(
        "proof_unchecked", "who does not know the secret may connect", HANDSHAKE,
        "!equal_in_constant_time(incoming_, proof_of(kConnects))", "false",
        tests=("cpp:handshake_",),
    ),
    Fault(
        "verdict_believed", "a rank connects to one that does not know the secret", HANDSHAKE,
        "message.verdict == kRefusal || !equal_in_constant_time(message.proof, proof_of(kAccepts))",
        "message.verdict == kRefusal",
        tests=("cpp:handshake_",),
    ),
    Fault(
        "replayed", "a handshake may be replayed", HANDSHAKE,
        "nonce_ = random_nonce();", "nonce_ = Sha256{};",
        tests=("cpp:handshake_",),
    ),
    Fault(
        "other_rank_connected", "a connection to another rank is taken", HANDSHAKE,
        "message.to != rank || message.from == rank", "false",
        tests=("cpp:handshake_",),
    ),
    Fault(
        "flipped_bit", "a flipped bit is not noticed", CHECKED,
        "frame_.left > 0 || crc_ == expected_", "true",
        tests=("cpp:checked_stream",),
    ),
    Fault(
        "flipped_length", "a flipped bit in a frame's length is not noticed", CHECKED,
        "crc32c(checked) != header_crc || bytes == 0", "bytes == 0",
        tests=("cpp:checked_stream",),
    ),
    Fault(
        "tls_other_rank", "a connection with TLS to another rank is taken", TLS,
        "found.to != rank", "false",
        tests=("cpp:tls_",),
    ),
    Fault(
        "tls_forged_record", "the forged records of a stranger are only waited for", TLS,
        "is_damaged_ = true;", "break;",
        tests=("cpp:tls_",),
    ),
    Fault(
        "tls_open_early", "a rank uses a connection before the other end is open", TLS,
        "api_.read_ex(ssl_, &welcome, 1, &bytes)", "1",
        tests=("cpp:tls_",),
    ),
    Fault(
        "tls_part_is_ready", "a part of a record counts as received", TLS,
        "may_have_more_ && api_.has_pending(ssl_) == 1", "api_.has_pending(ssl_) == 1",
        tests=("cpp:tls_",),
    ),
    Fault(
        "tls_alert_is_secret", "any alert says that the secrets differ", TLS,
        "(alert == openssl::kAlertIllegalParameter || alert == openssl::kAlertDecryptError)",
        "alert >= 0",
        tests=("cpp:tls_",),
    ),
    Fault(
        "tls_sent_twice", "bytes are sent again when the socket has taken them", TLS,
        "done += std::exchange(sealed_, 0);", "sealed_ = 0;",
        tests=("cpp:tls_",),
    ),
    Fault(
        "tls_buffer_unseen", "received bytes that wait in TLS are not seen", CONNECTION,
        "sockets_[incoming_.socket].has_received()", "false",
        tests=("cpp:connection_is_readable",),
    ),
    Fault(
        "slot_not_freed", "the memory of a removed set stays in use", ARENA,
        "memory_->release(slot, Slot::kBytes);\n  give_back(used);",
        tests=("world/test_process_sets.py", "c10d/test_groups.py"),
    ),
    Fault(
        "departed_awaited", "the last data of a rank that has left are awaited for ever", WAITS,
        "now - departed_since_ < graph_->patience_with_departed()", "true",
        tests=("cpp:departed_rank_s_last",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/world", "tests/setup"))
