# SPDX-License-Identifier: Apache-2.0
"""Faults of setup: how ranks find one another and agree on a world."""

from __future__ import annotations

from faults.fault import Fault, Room

FRAMES = "torch_ring/setup/frames.py"
KEY = "torch_ring/setup/job_key.py"
SECRET = "torch_ring/setup/secret_file.py"
PEERS = "torch_ring/setup/peer_info.py"
STORE = "torch_ring/setup/store_exchange.py"
HOST = "torch_ring/setup/host_socket.py"
NAME = "torch_ring/setup/socket_name.py"
LAUNCHERS = "torch_ring/setup/launchers.py"
TOPOLOGY = "torch_ring/setup/topology.py"
FAILURE = "torch_ring/setup/failure.py"
GROUPS = "torch_ring/setup/control_groups.py"

# fmt: off
FAULTS = (
    Fault(
        "settings_differ", "ranks may have different settings", PEERS,
        "if text != texts[lowest]:", "if False:",
        tests=("setup/test_exchange.py::test_different_settings_are_named_on_all_ranks",),
    ),
    Fault(
        "rank_twice", "two processes may have the same rank", PEERS,
        "if peer.rank in peers:", "if False:",
        tests=("setup/test_topology.py",),
    ),
    Fault(
        "overwritten", "a stranger may change what a rank has sent", STORE,
        "not isinstance(values, list) or self._unpacked(pack(own)) not in values",
        "not isinstance(values, list)",
        tests=("setup/test_job_key.py::test_the_own_value_is_checked_even_without_a_secret",),
    ),
    Fault(
        "hosts_mixed", "ranks of different hosts share memory", TOPOLOGY,
        "[machines.setdefault(peer.machine, len(machines)) for peer in peers]",
        "[machines.setdefault(peer.machine, 0) for peer in peers]",
        tests=("setup/test_topology.py",),
    ),
    Fault(
        "spins_beside_others", "ranks that share a CPU spin", TOPOLOGY,
        "return cpus.bit_count() >= len(neighbours)", "return True",
        tests=("setup/test_topology.py",),
    ),

    Fault(
        "key_not_bound", "a value may be moved to another key of the store", KEY,
        'return self._digest("store", self._job.encode(), name.encode(), value)',
        'return self._digest("store", self._job.encode(), value)',
        tests=("setup/test_job_key.py",),
    ),
    Fault(
        "tag_unchecked", "a stranger's value in the store is believed", KEY,
        "if not hmac.compare_digest(tag, self._key.tag(name, value)):", "if False:",
        tests=("setup/test_job_key.py",),
    ),
    Fault(
        "world_key_common", "ranks that have received different tables get the same key", KEY,
        'return self._digest("world", self._job.encode(), *sent)',
        'return self._digest("world", self._job.encode())',
        tests=("setup/test_job_key.py",),
    ),
    Fault(
        "secret_readable", "a secret that others can read is taken", SECRET,
        "if found.st_mode & 0o077:", "if False:",
        tests=("setup/test_secret_file.py",),
    ),
    Fault(
        "secret_not_stripped", "the line end of a secret file is a part of the secret", SECRET,
        "secret = data.strip()", "secret = data",
        tests=("setup/test_secret_file.py",),
    ),
    Fault(
        "last_words_lost", "the reason of a failure is lost when its connection is reset", FRAMES,
        "if end is not None and not frames:", "if end is not None:",
        tests=("setup/test_frames.py",),
    ),
    Fault(
        "frame_unbounded", "a stranger makes a rank keep a frame of any size", FRAMES,
        "if size > _MOST_BYTES[kind] or fds >", "if fds >",
        tests=("setup/test_frames.py",),
    ),
    Fault(
        "bomb", "a few bytes of a table may grow to any size", PEERS,
        "text = inflate.decompress(data, most)", "text = inflate.decompress(data)",
        tests=("setup/test_exchange_fuzz.py::test_a_bomb_eats_no_memory",),
    ),
    Fault(
        "rank_elsewhere", "a table may lack a rank of the world", PEERS,
        "if peers.keys() != set(range(size)):", "if False:",
        tests=("setup/test_topology.py",),
    ),
    Fault(
        "missing_wrong", "the error of a missing rank names the ranks that are here", FAILURE,
        "    missing = sorted(set(range(size)).difference(here))\n"
        "    if not missing:\n        return TimeoutError",
        "    missing = sorted(here)\n    if not missing:\n        return TimeoutError",
        tests=("setup/test_store_exchange.py::test_missing_ranks_are_named_on_all_hosts",),
    ),
    Fault(
        "control_characters", "a stranger's text writes control characters to the terminal",
        FAILURE,
        'c if c.isprintable() or c == "\\n" else "?" for c in', "c for c in",
        tests=("setup/test_exchange_failures.py",),
    ),
    Fault(
        "first_cause_lost", "the last failure of an init() is raised, not the first", STORE,
        "failure = self._read_failure() or failure\n", "self._read_failure()\n",
        tests=("setup/test_store_exchange.py::test_the_first_cause_wins",),
    ),
    Fault(
        "keys_stay", "each init() leaves its keys in the store", STORE,
        "self._store.delete_key(key)", "pass",
        tests=("setup/test_store_exchange.py::test_hundreds_of_worlds_leave_nothing_behind",),
    ),
    Fault(
        "told_twice", "a rank that comes again is told of the same failure", STORE,
        "self._store.add(self._key(_PLACES), _OVER)", "pass",
        tests=("setup/test_store_exchange.py::test_a_rank_that_knows_of_a_failure_is_not_told_again",),
    ),
    Fault(
        "sizes_mixed", "ranks of different sizes make a world", HOST,
        "if its_size != size:", "if False:",
        tests=("setup/test_exchange.py::test_different_sizes_are_refused",),
    ),
    Fault(
        "rank_let_in_twice", "two processes of one rank are let in on a host", HOST,
        "elif rank == me or rank in self.followers:", "elif rank == me:",
        tests=("setup/test_exchange.py::test_two_processes_of_one_rank_are_refused",),
    ),
    Fault(
        "death_unseen", "the leader does not notice that a rank has died", HOST,
        'self.fail(Failure.of_all(gone(f"rank {rank}", error)))', "pass",
        tests=("setup/test_exchange.py::test_a_rank_that_dies_is_noticed",),
    ),
    Fault(
        "rival_untold", "ranks of two jobs that have mixed train on", NAME,
        "is_told=is_new", "is_told=False",
        tests=(
            "setup/test_jobs_of_one_name.py::test_two_jobs_of_one_name_never_mix_silently",
        ),
    ),
    Fault(
        "late_leaver", "a rank is refused whose holder is still in an earlier world", NAME,
        "Deadline(_LEAVING_S) if is_new else deadline", "Deadline(_LEAVING_S)",
        tests=(
            "setup/test_jobs_of_one_name.py"
            "::test_a_rank_is_taken_when_its_last_process_gives_it_up",
        ),
    ),
    Fault(
        "jobs_mix", "two processes have one rank in worlds of one name", NAME,
        'name = f"{name}/{identity.rank}"', 'name = f"{name}/{secrets.token_hex(8)}"',
        tests=("setup/test_jobs_of_one_name.py::test_two_jobs_of_one_name_never_mix_silently",),
    ),
    Fault(
        "rank_not_waited_for", "a rank does not wait until its last process has left", NAME,
        "if patience.passed() or deadline.passed():", "if True:",
        tests=("setup/test_jobs_of_one_name.py::test_a_rank_is_taken_when_its_last_process_gives_it_up",),
    ),
    Fault(
        "foreign_user", "a process of another user may join", "torch_ring/setup/network.py",
        "if user != os.getuid():", "if False:",
        tests=("setup/test_host_strangers.py",),
    ),
    Fault(
        "inherited_rank", "a child of a rank becomes that rank once more", NAME,
        "if holder in ancestors(os.getpid()):", "if False:",
        tests=("setup/test_jobs_of_one_name.py",),
    ),
    Fault(
        "rank_not_below_size", "a rank that is not below the size is taken", LAUNCHERS,
        "if not 0 <= index < size:", "if False:",
        tests=("setup/test_identity.py",),
    ),
    Fault(
        "contradiction", "variables that contradict the launcher's are taken", LAUNCHERS,
        "if variable in environment and _whole(variable, environment) != _whole(same, "
        "environment):",
        "if False:",
        tests=("setup/test_identity.py",),
    ),
    Fault(
        "life_unnamed", "ranks that torchrun starts again find what an earlier life has left",
        LAUNCHERS,
        'job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")',
        'job=("TORCHELASTIC_RUN_ID", "WORLD_SIZE")',
        tests=("setup/test_identity.py::test_identity_from_each_launcher",),
    ),
    Fault(
        "shell_watched", "ranks end with a shell, which is no launcher", LAUNCHERS,
        "not name.startswith(launcher.daemons)", "False",
        tests=("setup/test_identity.py::test_a_parent_is_watched_that_is_the_launcher",),
    ),
    Fault(
        "tasks_of_first_node", "each node of Slurm has as many tasks as the first", LAUNCHERS,
        "        left -= nodes\n", "        left = 0\n",
        tests=("setup/test_identity.py",),
    ),
    Fault(
        "local_rank_counted", "the launcher's local rank is not used", TOPOLOGY,
        "index if peer.local_rank is None else peer.local_rank", "index",
        tests=("setup/test_topology.py",),
    ),
    Fault(
        "cross_rank_of_ranks", "the cross rank counts nodes that lack the local rank", TOPOLOGY,
        "if any(local_ranks[r] == mine for r in node)]", "]",
        tests=("setup/test_topology.py",),
    ),
    Fault(
        "quota_of_parent", "a quota of a parent group does not count", GROUPS,
        "for depth in range(len(parts), -1, -1):", "for depth in (len(parts),):",
        tests=("setup/test_control_groups.py",),
    ),
    Fault(
        "late_call_blamed", "a store that answers is blamed for a deadline that is over",
        "torch_ring/setup/store_client.py",
        "deadline = Deadline(max(deadline.left_s(), min(_LEAST_S, deadline.timeout_s)))", "pass",
        tests=("setup/test_store_client.py::test_a_store_that_answers_is_not_blamed_for_a_deadline_that_is_over",),
    ),
    Fault(
        "exited_awaited", "a failed init() waits for ranks that have exited", HOST,
        "self.lost.update(missed(self.notified | self.lost))", "pass",
        tests=("setup/test_exchange.py::test_a_failure_is_told_to_no_rank_that_has_exited",),
    ),
    Fault(
        "lack_unnamed", "an error of a full table of descriptors names no limit to raise", FAILURE,
        "if number not in _LACKS:", "if True:",
        tests=("world/test_limits.py", "setup/test_exchange.py"),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/setup",))
