# SPDX-License-Identifier: Apache-2.0
"""Faults of run: the launcher, its hosts, processes, signals and output."""

from __future__ import annotations

from faults.fault import Fault, Room

JOB = "torch_ring/run/job.py"
PROCESSES = "torch_ring/run/processes.py"
HOSTS = "torch_ring/run/hosts.py"
SETTINGS = "torch_ring/run/job_settings.py"
NUMA = "torch_ring/run/numa.py"
GROWTH = "torch_ring/run/growth.py"
SCREEN = "torch_ring/run/screen.py"
FUNCTION = "torch_ring/run/function.py"
SUPERVISOR = "torch_ring/run/supervisor.py"

# fmt: off
FAULTS = (
    Fault(
        "code_of_signal", "a job whose rank a signal has ended has a negative exit code", JOB,
        "return 128 - code if code < 0 else code", "return code",
        tests=("run/test_run_endings.py",),
    ),
    Fault(
        "others_left", "when a rank fails, the others go on for ever", JOB,
        "            self._pieces = self._screen.pieces\n            self._end(FAILURE_GRACE_S)\n",
        "            self._pieces = self._screen.pieces\n",
        tests=("run/test_run_endings.py::test_a_failing_rank_ends_the_others",),
    ),
    Fault(
        "last_failure", "the last failure counts, not the first", JOB,
        "if lost is None or self.failure is not None or self._code:",
        "if lost is None or self._code:",
        tests=("run/test_run_endings.py::test_the_first_failure_counts_and_is_said_again_at_the_end",),
    ),
    Fault(
        "second_signal", "a second signal does not end ranks that ignore the first", JOB,
        "            self._end(0.0)\n", "            pass\n",
        tests=("run/test_run_endings.py::test_a_second_signal_ends_ranks_that_ignore_the_first",),
    ),
    Fault(
        "usr1_ends", "SIGUSR1 ends the job", JOB,
        "if signal.Signals(number).name not in (*_ENDING, \"SIGPIPE\"):", "if False:",
        tests=("run/test_run_endings.py::test_a_signal_is_passed_on",),
    ),
    Fault(
        "cancelled_requeued", "a job that a user has cancelled is run again", JOB,
        "return self._is_warned and not self._signal and not self._code and is_in_peace",
        "return self._is_warned and not self._code and is_in_peace",
        tests=("run/test_run_endings.py",),
    ),
    Fault(
        "processes_left", "what ranks have left behind outlives the job", JOB,
        '                connection.send(do="end", grace_s=_LEFT_GRACE_S)\n',
        "                pass\n",
        tests=("run/test_run_endings.py::test_nothing_is_left_when_the_job_is_done",),
    ),
    Fault(
        "silent_host", "the launcher waits for ever for a host that does not answer", SUPERVISOR,
        "return [host for host, deadline in self.awaited.items() if deadline <= now]",
        "return [host for host, deadline in self.awaited.items() if deadline <= now - 1e6]",
        tests=("run/test_run_jobs.py::test_a_host_that_does_not_answer",),
    ),
    Fault(
        "too_few_stay", "the job goes on with fewer ranks than --min-np", JOB,
        "least is not None and left >= least:", "least is not None:",
        tests=(
            "run/test_run_elastic.py::test_processes_that_wait_to_be_let_in_are_no_living_ranks",
        ),
    ),
    Fault(
        "old_result", "a rank that is started again adds to the failed one's result", JOB,
        "self.results.pop(slot.rank, None)", "pass",
        tests=("run/test_run_function.py::test_a_rank_of_an_elastic_function_is_replaced",),
    ),
    Fault(
        "cross_rank_is_node", "the cross rank is the host, even where it lacks the local rank",
        HOSTS,
        "peers.index(node),\n                    len(peers),",
        "node,\n                    len(peers),",
        tests=("run/test_run_hosts.py::test_ranks_fill_hosts",),
    ),
    Fault(
        "slots_replaced", "a host that is named twice has the slots of the last name", HOSTS,
        "slots[host.name] = slots.get(host.name, 0) + host.slots", "slots[host.name] = host.slots",
        tests=("run/test_run_hosts.py::test_hosts_of_an_option",),
    ),
    Fault(
        "option_for_ssh", "a host's name may be an option of ssh", HOSTS,
        'if not _NAME.fullmatch(name) or name.startswith("-"):', "if not _NAME.fullmatch(name):",
        tests=("run/test_run_hosts.py",),
    ),
    Fault(
        "script_without_end", "a script that finds hosts may run for ever", HOSTS,
        "said, errors = process.communicate(timeout=_ANSWER_S)",
        "said, errors = process.communicate()",
        tests=("run/test_run_hosts.py::test_a_script_that_does_not_end_is_ended",),
    ),
    Fault(
        "tasks_unequal", "tasks that do not fit the nodes are taken", HOSTS,
        "if len(tasks) != nodes or min(tasks) < 1:", "if min(tasks) < 1:",
        tests=("run/test_run_hosts.py",),
    ),
    Fault(
        "home_sent", "variables of this host reach ranks on another one", SETTINGS,
        "theirs = dict(job.environment) if is_local else exported(job.environment)",
        "theirs = dict(job.environment)",
        tests=("run/test_run_hosts.py::test_the_variables_of_a_rank",),
    ),
    Fault(
        "environment_wins", "the environment goes before an option", SETTINGS,
        "return theirs | horovods | own | dict(job.variables)",
        "return dict(job.variables) | theirs | horovods | own",
        tests=("run/test_run_hosts.py::test_the_variables_of_a_rank", "run/test_run_options.py"),
    ),
    Fault(
        "secret_file_sent", "a rank on another host is told of the secret's file", SETTINGS,
        'unset |= {"TORCH_RING_SECRET_FILE"}', "pass",
        tests=("run/test_run_options.py",),
    ),
    Fault(
        "cores_overlap", "ranks with cores of their own share cores", NUMA,
        "mine = cores[len(cores) * turn // turns : len(cores) * (turn + 1) // turns]",
        "mine = cores[len(cores) * turn // turns :]",
        tests=("run/test_run_numa.py::test_ranks_with_cores_of_their_own",),
    ),
    Fault(
        "foreign_cpus", "ranks are bound to CPUs that the job may not use", NUMA,
        'cpulist") & allowed for number', 'cpulist") for number',
        tests=("run/test_run_numa.py::test_only_cpus_that_the_job_may_use",),
    ),
    Fault(
        "main_thread_bound", "of a running process only the main thread is bound", NUMA,
        "            os.sched_setaffinity(int(thread), cpus)\n", "            pass\n",
        tests=("run/test_run_numa.py::test_a_process_that_runs_is_bound_with_its_threads",),
    ),
    Fault(
        "restarts_at_once", "a process that keeps failing is started at once each time", GROWTH,
        "place.due_at = now + min(delay_s, _LONGEST_DELAY_S)", "place.due_at = now",
        tests=("run/test_run_hosts.py",),
    ),
    Fault(
        "slot_numbers_reused", "a slot that comes later gets the number of another", GROWTH,
        "number = len(self._places)", "number = len(self._listed)",
        tests=("run/test_run_hosts.py::test_slots_that_come_get_the_next_numbers_and_keep_them",),
    ),
    Fault(
        "left_out_as_long", "a host that keeps failing is left out equally long each time", GROWTH,
        "        record.times_out += 1\n", "",
        tests=("run/test_run_hosts.py::test_a_host_is_left_out_twice_as_long_each_time",),
    ),
    Fault(
        "newcomer_waits_counted", "a process that waits to be let in counts as a rank", PROCESSES,
        "return process.is_newcomer and not self._growth.is_let_in(process.name)",
        "return False",
        tests=(
            "run/test_run_elastic.py::test_processes_that_wait_to_be_let_in_are_no_living_ranks",
            "run/test_run_elastic.py::test_a_job_ends_without_the_processes_that_wait_to_be_let_in",
        ),
    ),
    Fault(
        "lines_mixed", "half a line of a rank is shown, and another's follows", SCREEN,
        "        self._begun[rank, stream] = rest\n        self._write_lines(rank, stream, [line "
        'for line in lines if line != b"\\r"])',
        "        self._begun[rank, stream] = bytearray()\n        self._write_lines(rank, stream, "
        "[*lines, rest] if rest else lines)",
        tests=("run/test_run_screen.py::test_lines_are_put_together",),
    ),
    Fault(
        "last_line_lost", "the last line of a rank without a line end is lost", SCREEN,
        '                self._write_lines(rank, stream, [rest + b"\\n"])\n            if',
        "                pass\n            if",
        tests=("run/test_run_screen.py",),
    ),
    Fault(
        "file_overwritten", "a rank that is started again overwrites its file", SCREEN,
        '"ab" if key in self._kept else "wb"', '"wb"',
        tests=("run/test_run_screen.py::test_a_rank_that_is_started_again_adds_to_its_files",),
    ),
    Fault(
        "gap_unmarked", "lost output leaves no mark", SCREEN,
        'self._gap = f"\\ntorch_ring.run: output is missing here: {reason}\\n".encode()', "pass",
        tests=("run/test_run_screen.py::test_a_gap_is_marked_where_output_was_lost",),
    ),
    Fault(
        "error_without_cause", "a function's error loses its cause", FUNCTION,
        '            cause = pickle.loads(told["error"])\n', "            cause = None\n",
        tests=("run/test_run_function.py::test_an_error_has_the_traceback_of_its_rank",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/run",))
