# SPDX-License-Identifier: Apache-2.0
"""Faults of csrc/messages: sends and receives between two ranks."""

from __future__ import annotations

from faults.fault import Fault, Room

PROTOCOL = "csrc/messages/message_protocol.cc"
MESSAGES = "csrc/messages/point_to_point.cc"

# fmt: off
FAULTS = (
    Fault(
        "any_tag", "a receive takes a message with another tag", PROTOCOL,
        "receive.tag == arrival.frame.tag", "true",
        tests=("cpp:messages_of_one_tag",),
    ),
    Fault(
        "any_source", "a receive takes the message of another rank", PROTOCOL,
        "receive.peer.value_or(arrival.source) == arrival.source", "true",
        tests=("cpp:messages, ",),
    ),
    Fault(
        "other_dtype", "a message of another dtype is taken", PROTOCOL,
        "answer.bytes > spec.memory.size() || answer.dtype != spec.dtype",
        "answer.bytes > spec.memory.size()",
        tests=("cpp:a_message_that_does_not_fit",),
    ),
    Fault(
        "no_deadline", "a message waits for ever for a late rank", PROTOCOL,
        "if (spec.deadline != Clock::time_point::max())\n"
        "    due_.emplace(spec.deadline, Due{request, std::nullopt});",
        tests=("cpp:a_request_past_its_deadline",),
    ),
    Fault(
        "still_for_ever", "data that no longer move are awaited for ever", PROTOCOL,
        "now - side.stream->still_since() > world_.transfer_timeout", "false",
        tests=("cpp:a_message_that_stands_still",),
    ),
    Fault(
        "death_awaited", "a message to a dead rank waits for ever", MESSAGES,
        "end(Error(ErrorKind::kPeerLost, how));",
        tests=("cpp:a_rank_that_dies_ends",),
    ),
    Fault(
        "to_itself", "a rank waits for a message that it sends to itself", MESSAGES,
        "*spec.peer == world_.rank", "false",
        tests=("cpp:a_message_needs_another",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/collectives",))
