"""Faults of csrc/control: who is alive, who may connect, what is passed on."""

from __future__ import annotations

from faults.fault import Fault, Room

PLANE = "csrc/control/control_plane.cc"
ACCEPTOR = "csrc/control/acceptor.cc"
NEWS = "csrc/control/news.cc"
CLAIM = "csrc/control/rank_claim.cc"
SUBSCRIPTIONS = "csrc/control/subscriptions.cc"

# fmt: off
FAULTS = (
    Fault(
        "foreign_user_connects", "a process of another user may connect", ACCEPTOR,
        "listener.unix && !is_this_users(socket.get())", "false",
        tests=("world/test_strangers.py",),
    ),
    Fault(
        "own_host_over_tcp", "who knows the key may pass for a rank of this host", PLANE,
        "unix != (at(options_.host_of, peer) == at(options_.host_of, rank_))", "false",
        tests=("world/test_strangers.py", "setup/test_connect.py"),
    ),
    Fault(
        "silence_borne", "a silent rank is never given up", PLANE,
        "slept - link.heard() > options_.heartbeat_timeout", "false",
        tests=("world/test_failures.py", "world/test_several_hosts.py"),
    ),
    Fault(
        "not_passed_on", "only the neighbours of a dead rank hear of it", PLANE,
        "&link != from && !news_.departed(link.peer())", "false",
        tests=("world/test_failures.py",),
    ),
    Fault(
        "outlives_launcher", "a rank outlives its launcher", PLANE,
        "::kill(::getpid(), SIGTERM);",
        tests=("world/test_exits.py",),
    ),
    Fault(
        "stops_at_any_point", "ranks stop at a point that one of them has passed", NEWS,
        "furthest = std::max(furthest, passed);", "furthest = passed;",
        tests=("world/test_preemption.py",),
    ),
    Fault(
        "same_rank_unseen", "a world lives that may have ranks of two jobs", CLAIM,
        "*started <= began_ms_", "false",
        tests=("setup/test_jobs_of_one_name.py",),
    ),
    Fault(
        "others_death", "a set fails when a rank dies that is no member", SUBSCRIPTIONS,
        "if (!std::ranges::binary_search(subscription.members, news.rank)) return;",
        tests=("world/test_process_set_errors.py", "world/test_several_hosts.py"),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/world", "tests/setup"))
