# SPDX-License-Identifier: Apache-2.0
"""Faults of the agreement: which requests run, and what the ranks are told."""

from __future__ import annotations

from faults.fault import Fault, Room

AGREEMENT = "csrc/engine/agreement.cc"

# fmt: off
FAULTS = (
    Fault(
        "unlike_agreed", "different shapes or dtypes are no mismatch", AGREEMENT,
        "!decision.mismatch && a != *reference && !equal(first, a->fingerprint)", "false",
        tests=("cpp:a_group_and_a_single_request",),
    ),
    Fault(
        "splits_unchecked", "the splits of an alltoall need not fit", AGREEMENT,
        "sent != expected && !misfit", "false",
        tests=("c10d/test_errors.py",),
    ),
    Fault(
        "joined_awaited", "a rank that has joined is waited for", AGREEMENT,
        "!pending.by_rank[rank] && !joined_[rank]", "!pending.by_rank[rank]",
        tests=("cpp:requests_are_decided_without",),
    ),

    Fault(
        "last_joined", "join() returns another rank than the last one", AGREEMENT,
        "last_joined_ = end - 1;", "last_joined_ = run.first;",
        tests=("cpp:join_is_decided",),
    ),
    Fault(
        "runs_without_joined", "a collective that needs all ranks runs without a joined one",
        AGREEMENT,
        "if (can_stand_in) return std::nullopt;", "return std::nullopt;",
        tests=("cpp:joined_rank",),
    ),
    Fault(
        "deadlock_unseen", "ranks that wait for different collectives wait for ever", AGREEMENT,
        "nothing_new && all_blocked", "false",
        tests=("cpp:ranks_that_all_wait",),
    ),
    Fault(
        "group_waits", "the rest of a group waits when the ranks disagree about its size",
        AGREEMENT,
        "if (one.group != other.group) decision.ended_groups = {group_of(one), group_of(other)};",
        tests=("cpp:groups_of_different_sizes",),
    ),
    Fault(
        "fence_resets", "requests are numbered anew after a fence", AGREEMENT,
        "fingerprint.collective == Collective::kBarrier && is_numbered(fingerprint.name)",
        "is_barrier(fingerprint.collective) && is_numbered(fingerprint.name)",
        tests=("c10d/test_operations.py::test_a_barrier_does_not_number_later_operations_anew",),
    ),
    Fault(
        "here_is_missing", "an error names ranks as late that have come", AGREEMENT,
        "if (!announced) ranks.push_back(rank);", "ranks.push_back(rank);",
        tests=("cpp:agreement_names_missing",),
    ),
    Fault(
        "launches_unlike", "ranks that have run ahead differently go on", AGREEMENT,
        "!decision.mismatch && !joined_[rank] && a->launches != other()", "false",
        tests=("cpp:ranks_that_have_run_ahead_differently",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/collectives", "tests/world"), ("tests/device",))
