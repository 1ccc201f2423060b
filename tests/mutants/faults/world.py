# SPDX-License-Identifier: Apache-2.0
"""Faults of world: init and shutdown, process sets, stops, exits."""

from __future__ import annotations

from faults.fault import Fault, Room

SETS = "torch_ring/world/process_set.py"
TABLE = "torch_ring/world/process_set_table.py"
CURRENT = "torch_ring/world/current.py"
JOIN = "torch_ring/world/join.py"
GROUPS = "torch_ring/setup/control_groups.py"
STOP = "torch_ring/world/preemption.py"
RANKS = "torch_ring/world/ranks.py"
ENGINE = "torch_ring/world/engine.py"
REASON = "torch_ring/world/exit_reason.py"
TIMELINES = "torch_ring/world/timelines.py"
SIGNALS = "torch_ring/world/forked_signals.py"
ONE_RANK = "torch_ring/native/one_rank.py"
LAUNCH = "torch_ring/run/launch.py"

# fmt: off
FAULTS = (
    Fault(
        "sets_not_compared", "ranks may add different process sets", TABLE,
        "if any(other != digest for other, _ in gathered):", "if False:",
        tests=("world/test_process_set_errors.py::test_different_process_sets_are_refused",),
    ),
    Fault(
        "set_twice", "a process set may be added twice", TABLE,
        "if there is not None and not (keeps and there is self.everyone):", "if False:",
        tests=("world/test_process_sets.py",),
    ),
    Fault(
        "memory_of_set_kept", "a removed set keeps its memory", TABLE,
        "            record.release_slot()\n", "",
        tests=("world/test_process_sets.py::test_nothing_is_left_of_a_removed_set",),
    ),
    Fault(
        "plane_outlives_exit", "a control plane uses OpenSSL while that frees its memory", CURRENT,
        "    connect.close_all_at_exit()\n", "",
        tests=("world/test_exits.py::test_a_process_that_exits_has_no_control_plane_any_more",),
    ),
    Fault(
        "failed_member_untold", "a member waits for one whose engine could not be made", TABLE,
        "self._connections.plane.fail(self._number, self._failure)", "pass",
        tests=("world/test_process_set_errors.py::test_a_member_whose_engine_cannot_be_made",),
    ),
    Fault(
        "lack_of_one", "a member without memory for a set fails alone", TABLE,
        "if _FAILED in slots:", "if slot == _FAILED:",
        tests=("world/test_limits.py::test_a_set_that_does_not_fit_is_refused_on_all_ranks",),
    ),
    Fault(
        "number_reused", "a new set gets the number of a removed one", TABLE,
        "                self._numbers += 1\n", "                self._numbers = len(ids)\n",
        tests=("world/test_process_sets.py",),
    ),
    Fault(
        "global_root", "the root of a set is an index in the set", SETS,
        "return ranks.index(root_rank)", "return root_rank",
        tests=(
            "collectives/test_every_collective.py",
            "state/test_broadcast_state.py::test_a_process_set_with_a_global_root",
        ),
    ),
    Fault(
        "world_rank_in_set", "the rank in a set is the rank in the world", SETS,
        "return membership(self).ranks.index(current.rank())",
        "return current.rank() if membership(self) else 0",
        tests=("world/test_process_sets.py::test_sets_are_added_and_removed",),
    ),
    Fault(
        "lost_set_used", "a set that has lost a rank may be used", SETS,
        "if process_set._lost is not None:", "if False:",
        tests=("elastic/test_kept_process_sets.py::test_a_lost_set_says_which_rank_it_has_lost",),
    ),
    Fault(
        "set_of_some", "a set is made again that a survivor does not know", SETS,
        "and all(names in sets for sets in survivors)", "",
        tests=("elastic/test_kept_process_sets.py::test_sets_that_not_all_survivors_know_are_not_kept",),
    ),
    Fault(
        "old_hierarchy", "a hierarchy keeps the ranks of the last world", SETS,
        "if self._found[0] is not host_of:", "if not self._found[1]:",
        tests=("elastic/test_kept_process_sets.py::test_a_hierarchy_that_was_asked_for_twice_is_made_again",),
    ),
    Fault(
        "inner_job_of_newcomers", "the job that a newcomer starts has newcomers alone", CURRENT,
        "if config.is_newcomer and is_of_inner_job(rank=rank, size=size):", "if False:",
        tests=("elastic/test_first_world.py::test_a_newcomers_own_job_has_no_newcomers",),
    ),
    Fault(
        "second_init_silent", "a second init() for another rank is no warning", CURRENT,
        "if rank in (None, world.rank) and size in (None, world.size):", "if True:",
        tests=("setup/test_siblings.py::test_init_as_another_rank",),
    ),
    Fault(
        "child_communicates", "a forked child uses its parent's engine", CURRENT,
        "        _is_parents = True\n", "",
        tests=("world/test_forked_children.py::test_a_forked_child_can_ask_but_not_communicate",),
    ),
    Fault(
        "connections_in_child", "a forked child holds its parent's connections", CURRENT,
        "    network.close_all_in_child()\n", "",
        tests=("world/test_forked_children.py",),
    ),
    Fault(
        "reason_lost", "the other ranks do not hear why a rank has left", CURRENT,
        "_leave(reason_at_exit())", '_leave("")',
        tests=("world/test_exits.py::test_the_other_ranks_hear_why_a_rank_left",),
    ),
    Fault(
        "library_blamed", "the reason to leave names the line of a library", REASON,
        "file, line = (own or lines)[-1]", "file, line = lines[-1]",
        tests=(
            "world/test_exits.py::test_the_other_ranks_hear_why_a_rank_left",
            "world/test_failures.py",
        ),
    ),
    Fault(
        "success_is_reason", "sys.exit(0) is told as a failure", REASON,
        "if status is None or status == 0:", "if status is None:",
        tests=("world/test_exits.py", "world/test_failures.py"),
    ),
    Fault(
        "stops_alone", "a rank that got a signal stops at a step of its own", STOP,
        "stops = bool(_got) if world.plane is None else _passed(world, world.plane)",
        "stops = bool(_got)",
        tests=("world/test_preemption.py::test_all_ranks_stop_at_the_same_step",),
    ),
    Fault(
        "early_signal_lost", "a signal before the world is made is forgotten", STOP,
        "current.after_join(_tell)\n", "",
        tests=("world/test_preemption.py::test_a_signal_that_came_before_the_world",),
    ),
    Fault(
        "stop_without_end", "ranks wait for ever for a rank that is stopped", STOP,
        "for _ in pauses(deadline, world.size):", "for _ in iter(int, 1):",
        tests=("world/test_preemption.py::test_a_rank_that_is_stopped_does_not_hold_the_others_for_ever",),
    ),
    Fault(
        "handler_in_child", "a forked child inherits the handler of a signal", SIGNALS,
        "            give_back(number, handler)\n", "            pass\n",
        tests=("world/test_preemption.py::test_processes_that_are_forked",),
    ),
    Fault(
        "rank_twice_in_set", "a rank may be twice in a process set", RANKS,
        " or len(set(ranks)) < len(ranks):", ":",
        tests=("world/test_process_sets.py::test_wrong_ranks_are_refused",),
    ),
    Fault(
        "rank_above", "a process set may have a rank that does not exist", RANKS,
        "if ranks[-1] >= size:", "if ranks[-1] > size:",
        tests=("world/test_process_sets.py::test_sets_are_added_and_removed",),
    ),
    Fault(
        "interrupted_exchange", "Ctrl-C puts the ranks out of step", ENGINE,
        "        if is_open:\n            came[number].append(frame)\n"
        "        if not is_open or len(came[number]) > 1:",
        "        if True:",
        tests=("world/test_process_set_errors.py::test_an_interrupt_while_a_set_is_added_or_removed",),
    ),
    Fault(
        "secret_not_demanded", "nobody is told that the hosts of a job have no secret", JOIN,
        "    if world.is_guarded:\n", "    if False:\n",
        tests=("world/test_strangers.py",),
    ),
    Fault(
        "secret_file_ignored", "a secret in a file is none", JOIN,
        "if config.secret_file and not config.secret:", "if False:",
        tests=("world/test_strangers.py",),
    ),
    Fault(
        "observer_ends_job", "a file that cannot be written ends a job that goes on", JOIN,
        "            if not is_of_going_job:\n                raise\n", "            raise\n",
        tests=("tracing/test_timeline.py::test_a_job_that_goes_on_does_not_end_for_it",),
    ),
    Fault(
        "own_number_told", "a program's own number of threads is told to be too many", JOIN,
        "and 2 * threads >= allowed", "",
        tests=("world/test_compute_threads.py",),
    ),
    Fault(
        "threads_beside_gpu", "threads are told to be too many where a GPU computes", JOIN,
        "and torch.cuda.device_count() == 0", "",
        tests=("world/test_compute_threads.py",),
    ),
    Fault(
        "quota_of_all", "advice on threads takes a quota for that of other ranks", GROUPS,
        "(cpu_quota(), local_size)", "(cpu_quota(), sharers)",
        tests=("world/test_compute_threads.py",),
    ),
    Fault(
        "timeline_overwritten", "a world that forms anew overwrites the first timeline", TIMELINES,
        "    if number == 1:\n        return path\n", "    return path\n",
        tests=("tracing/test_timeline.py::test_a_world_that_forms_anew_keeps_the_first_file",),
    ),
    Fault(
        "trains_alone", "on macOS a rank of several trains alone", JOIN,
        "    require_one_rank(identity.size, identity.source())\n", "",
        tests=("install/test_one_rank.py::test_several_ranks_are_refused_and_one_is_started",),
    ),
    Fault(
        "alone_unscaled", "on macOS an allreduce ignores the second factor", ONE_RANK,
        "for factor in map(float, factors):", "for factor in map(float, factors[:1]):",
        tests=("install/test_one_rank.py::test_all_calls_do_the_same",),
    ),
    Fault(
        "alone_options_lost", "on macOS the launcher drops its options", LAUNCH,
        "secret_of(environment, variables), variables, unset",
        "secret_of(environment, variables), {}, unset",
        tests=("install/test_one_rank.py::test_the_launcher_does_the_same",),
    ),
    Fault(
        "alone_lowest_lost", "on macOS an integer times NaN is the highest number", ONE_RANK,
        "min(limits.max, max(limits.min, number * exact))",
        "max(limits.min, min(limits.max, number * exact))",
        tests=("install/test_one_rank.py::test_all_calls_do_the_same",),
    ),
    Fault(
        "alone_not_in_place", "on macOS a collective in place does not write", ONE_RANK,
        "output.copy_(result)", "output",
        tests=("install/test_one_rank.py::test_all_calls_do_the_same",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/world",))
