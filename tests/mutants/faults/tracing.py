# SPDX-License-Identifier: Apache-2.0
"""Faults of tracing: timelines, dumps, counters, late ranks, the page."""

from __future__ import annotations

from faults.fault import Fault, Room

RECORDER = "torch_ring/tracing/flight_recorder.py"
LATENESS = "torch_ring/tracing/lateness.py"
EXPORTER = "torch_ring/tracing/exporter.py"
PROMETHEUS = "torch_ring/tracing/prometheus.py"
COUNTERS = "torch_ring/tracing/counters.py"
OPERATIONS = "torch_ring/tracing/operations.py"
ANALYSIS = "torch_ring/tracing/page/analysis.py"
RECORDING = "torch_ring/tracing/page/recording.py"

# fmt: off
FAULTS = (
    Fault(
        "dump_in_place", "a reader sees half a dump", RECORDER,
        "        os.replace(name, target)\n", "        target.write_bytes(data)\n",
        tests=("tracing/test_flight_recorder.py",),
    ),
    Fault(
        "undecided_alike", "operations without an agreement match any other", RECORDER,
        "return record.sequence or _UNDECIDED + zlib.crc32(key.encode())",
        "return record.sequence or _UNDECIDED",
        tests=("tracing/test_flight_recorder.py",),
    ),
    Fault(
        "sets_overlap", "the records of a process set hide those of the world", RECORDER,
        "recorded.set_id * _PER_SET + sequence", "sequence",
        tests=("tracing/test_flight_recorder.py",),
    ),
    Fault(
        "index_in_set", "a dump gives the index in the set for the late rank", RECORDER,
        "recorded.ranks[record.last_rank] if record.last_rank >= 0 else None", "record.last_rank",
        tests=("tracing/test_flight_recorder.py",),
    ),
    Fault(
        "handler_replaced", "the program's handler of SIGUSR2 is replaced", RECORDER,
        "if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:", "if True:",
        tests=("tracing/test_flight_recorder.py::test_the_programs_own_handler_stays",),
    ),
    Fault(
        "dump_hides_error", "a dump that cannot be written hides the first error", RECORDER,
        "    except Exception as error:  # it must not hide the first error\n",
        "    except KeyError as error:\n",
        tests=("tracing/test_flight_recorder.py::test_without_a_folder_an_error_stays_as_it_is",),
    ),
    Fault(
        "any_rank_late", "a rank that is late in turn with others is a straggler", LATENESS,
        "if len(its) < 3 or 3 * ns <= 2 * waited.total():", "if len(its) < 3:",
        tests=("tracing/test_lateness.py::test_ranks_that_are_late_in_turn_are_not_named",),
    ),
    Fault(
        "late_index", "the straggler of a set is its index in the set", LATENESS,
        "ranks[rank], len(its), len(waits), median", "rank, len(its), len(waits), median",
        tests=("tracing/test_flight_recorder.py", "tracing/test_lateness.py"),
    ),
    Fault(
        "round_twice", "operations that were agreed on together count several times", LATENESS,
        "waits.setdefault(record.round, record)", "waits.setdefault(id(record), record)",
        tests=("tracing/test_lateness.py",),
    ),
    Fault(
        "answer_too_long", "a long answer does not fit in a control message", LATENESS,
        "if len(longer.encode(errors=\"replace\")) > _MOST_BYTES:", "if False:",
        tests=("tracing/test_lateness.py",),
    ),
    Fault(
        "same_file", "all ranks write their counters to one file", EXPORTER,
        """return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")""", "return path",
        tests=("tracing/test_metrics_export.py::test_where_a_rank_writes",),
    ),
    Fault(
        "old_file_stays", "a process with another rank leaves the file of its earlier one",
        EXPORTER,
        "                earlier.unlink()", "                pass",
        tests=("tracing/test_metrics_export.py::test_a_process_removes_its_earlier_file_and_no_other",),
    ),
    Fault(
        "others_file_removed", "a process removes a file that another one writes by now", EXPORTER,
        "if pid == os.getpid() and earlier.stat().st_ino == inode:", "if pid == os.getpid():",
        tests=("tracing/test_metrics_export.py::test_a_process_removes_its_earlier_file_and_no_other",),
    ),
    Fault(
        "port_of_parent", "a forked child holds its parent's port", EXPORTER,
        "    close_in_child(server.socket)\n", "",
        tests=("tracing/test_metrics_export.py::test_a_forked_child_neither_writes_nor_serves",),
    ),
    Fault(
        "not_cumulative", "a histogram's buckets are not cumulative", PROMETHEUS,
        "zip(bounds, accumulate(histogram.counts), strict=True)",
        "zip(bounds, histogram.counts, strict=True)",
        tests=("tracing/test_metrics_export.py",),
    ),
    Fault(
        "nanoseconds", "a time in seconds is given in nanoseconds", COUNTERS,
        """each["waiting_ns"] / 1e9""", """each["waiting_ns"]""",
        tests=("tracing/test_metrics_export.py",),
    ),
    Fault(
        "ambiguous_counts", "a repeated name without a number names a late rank", ANALYSIS,
        "if len(ranks) < 2 or len(ranks) < len(operations):", "if len(ranks) < 2:",
        tests=("tracing/test_pages.py",),
    ),
    Fault(
        "waits_summed", "waits at the same time are added", ANALYSIS,
        "length += max(0.0, end - max(begin, covered))", "length += end - begin",
        tests=("tracing/test_pages.py",),
    ),
    Fault(
        "step_of_first_rank", "a step begins when the first rank comes to it", ANALYSIS,
        "max(of_ranks, key=lambda rank: of_ranks[rank])",
        "min(of_ranks, key=lambda rank: of_ranks[rank])",
        tests=("tracing/test_pages.py::test_a_step_of_one_late_rank_has_the_same_time_on_all_ranks",),
    ),
    Fault(
        "pickle_runs_code", "a dump may run code", RECORDING,
        '        raise pickle.UnpicklingError(f"it has a {module_name}.{global_name}, and not '
        'plain data")',
        "        return super().find_class(module_name, global_name)",
        tests=("tracing/test_pages.py::test_a_pickle_runs_no_code",),
    ),
    Fault(
        "failed_unended", "a failed operation is drawn to the end of the recording", RECORDING,
        """        finished = ours.get("ended_ns")\n""", "        pass\n",
        tests=("tracing/test_pages.py::test_a_failed_operation_has_its_error_and_its_end",),
    ),
    Fault(
        "timelines_apart", "after a start that some ranks lack, timelines have other numbers",
        "torch_ring/world/timelines.py",
        "self._number = 1 + max(map(int, gather(str(self._number))))", "self._number += 1",
        tests=("tracing/test_timeline.py",),
    ),
    Fault(
        "killed_writer", "a timeline whose writer was killed cannot be read", RECORDING,
        "for whole in (lines, lines[:-1]):", "for whole in (lines,):",
        tests=("tracing/test_pages.py::test_a_timeline_whose_writer_was_killed",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/tracing",))
