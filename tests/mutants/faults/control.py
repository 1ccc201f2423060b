# SPDX-License-Identifier: Apache-2.0
"""Faults of csrc/control: who is alive, who may connect, what is passed on."""

from __future__ import annotations

from faults.fault import Fault, Room

PLANE = "csrc/control/control_plane.cc"
ACCEPTOR = "csrc/control/acceptor.cc"
NEWS = "csrc/control/news.cc"
SUBSCRIPTIONS = "csrc/control/subscriptions.cc"

# fmt: off
FAULTS = (
    Fault(
        "foreign_user_connects", "a process of another user may connect", ACCEPTOR,
        "credentials.uid == ::getuid()", "true",
        tests=("cpp:control_plane_drops_processes_of_other",),
    ),
    Fault(
        "own_host_over_tcp", "who knows the key may pass for a rank of this host", PLANE,
        "unix != (at(options_.host_of, peer) == at(options_.host_of, rank_))", "false",
        tests=("cpp:control_plane_takes_ranks_of_its_host",),
    ),
    Fault(
        "silence_borne", "a silent rank is never given up", PLANE,
        "slept - link.heard() > options_.heartbeat_timeout", "false",
        tests=("cpp:control_plane_loses_a_silent",),
    ),
    Fault(
        "not_passed_on", "only the neighbours of a dead rank hear of it", PLANE,
        "&link != from && !news_.departed(link.peer())", "false",
        tests=("cpp:departed_rank_s_last",),
    ),
    Fault(
        "outlives_launcher", "a rank outlives its launcher", PLANE,
        "::kill(::getpid(), SIGTERM);",
        tests=("world/test_exits.py",),
    ),
    Fault(
        "stops_at_any_point", "ranks stop at a point that one of them has passed", NEWS,
        "furthest = std::max(furthest, passed);", "furthest = passed;",
        tests=("cpp:control_planes_stop_at_one_point",),
    ),
    Fault(
        "others_death", "a set fails when a rank dies that is no member", SUBSCRIPTIONS,
        "if (!std::ranges::binary_search(subscription.members, news.rank)) return;",
        tests=("cpp:control_plane_tells_a_set_s",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/world", "tests/setup"))
