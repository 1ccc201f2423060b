# SPDX-License-Identifier: Apache-2.0
"""Faults of c10d: groups of torch.distributed, and the names of backends."""

from __future__ import annotations

from faults.fault import Fault, Room

GROUPS = "torch_ring/c10d/groups.py"
REGISTRATION = "torch_ring/c10d/registration.py"
RECONFIGURE = "torch_ring/c10d/reconfiguration.py"

# fmt: off
FAULTS = (
    Fault(
        "number_repeated", "two groups of the same ranks share a set's keys", GROUPS,
        "        shared.made[self._global_ranks] += 1\n", "",
        tests=("c10d/test_lives.py", "c10d/test_random_collectives.py"),
    ),
    Fault(
        "earlier_life", "a group meets one of an earlier life under its name", GROUPS,
        """PrefixStore(f"{shared.world.token}/{number}", self._store)""",
        """PrefixStore(f"{number}", self._store)""",
        tests=("c10d/test_lives.py::test_a_group_is_not_taken_for_one_of_an_earlier_life",),
    ),
    Fault(
        "failure_of_member", "a member waits for one that could not make the group", GROUPS,
        "            if info.failure:\n                raise RingError(",
        "            if False:\n                raise RingError(",
        tests=("c10d/test_groups.py",),
    ),
    Fault(
        "waits_for_member", "a group waits for ever for a member", GROUPS,
        "if waited_s > self._config.init_timeout_s:", "if False:",
        tests=("c10d/test_groups.py::test_a_member_that_does_not_come",),
    ),
    Fault(
        "late_member_wrong", "the error of a late member names the ranks in the group", GROUPS,
        """ranks = ", ".join(str(self._global_ranks[rank]) for rank in late[:16])""",
        """ranks = ", ".join(str(rank) for rank in late[:16])""",
        tests=("c10d/test_groups.py::test_a_member_that_does_not_come",),
    ),
    Fault(
        "destroyed_used", "a group that was destroyed can be used", GROUPS,
        """        if self._left is not None:\n            raise RingError(""",
        """        if False:\n            raise RingError(""",
        tests=("c10d/test_errors.py::test_abort_from_another_thread",),
    ),
    Fault(
        "memory_stays", "the memory of a group that all have left is not freed", GROUPS,
        "        process_sets.release_slot(self.slot)\n        with contextlib",
        "        with contextlib",
        tests=("c10d/test_groups.py::test_groups_leave_nothing_behind",),
    ),
    Fault(
        "keys_of_group_stay", "a group leaves its keys in the store", GROUPS,
        """self.store.delete_key(f"member/{self.rank}")""", "pass",
        tests=("c10d/test_groups.py::test_a_group_that_all_have_left_has_no_keys_in_the_store",),
    ),
    Fault(
        "world_kept", "a world outlives its last group", GROUPS,
        "            self.world.process_sets.close(why)\n", "            pass\n",
        tests=("c10d/test_groups.py::test_a_world_ends_with_its_last_group",),
    ),
    Fault(
        "reason_of_group_lost", "the others do not hear why a program has left its groups", GROUPS,
        "group._leave(reason_at_exit())", """group._leave("")""",
        tests=("c10d/test_entry_points.py::test_in_place_of_gloo",),
    ),
    Fault(
        "split_rank", "a rank of a split group has its old rank", GROUPS,
        "rank = list(ranks).index(self.rank)", "rank = self.rank",
        tests=("c10d/test_reconfigure.py::test_a_part_of_a_group_has_the_order_given",),
    ),
    Fault(
        "handles_unsorted", "the ranks of a set of handles have different orders", RECONFIGURE,
        "list(handles) if isinstance(handles, list) else sorted(handles)", "list(handles)",
        tests=("c10d/test_reconfigure.py",),
    ),
    Fault(
        "handle_twice", "a handle may be there twice", RECONFIGURE,
        "if not texts or len(set(texts)) < len(texts):", "if not texts:",
        tests=("c10d/test_reconfigure.py",),
    ),
    Fault(
        "own_store_first", "each rank of a new group meets the others in its own store",
        RECONFIGURE,
        "if first == self.handle:", "if True:",
        tests=("c10d/test_reconfigure.py::test_after_a_lost_rank",),
    ),
    Fault(
        "gloo_taken", "gloo is replaced although nobody has asked", REGISTRATION,
        "if dist.is_available() and config.as_gloo:", "if dist.is_available():",
        tests=("c10d/test_entry_points.py::test_ring_without_an_import",),
    ),
    Fault(
        "name_of_ring", "a program that asks for gloo is told another name", REGISTRATION,
        "return _GLOO if backend == name else backend", "return backend",
        tests=("c10d/test_entry_points.py::test_in_place_of_gloo",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/c10d",))
