# SPDX-License-Identifier: Apache-2.0
"""Faults of csrc/engine: what is run, fused, timed, and told."""

from __future__ import annotations

from faults.fault import Fault, Room

EXECUTOR = "csrc/engine/executor.cc"
DRIVER = "csrc/engine/driver.cc"
QUEUE = "csrc/engine/request_queue.cc"
WATCHDOG = "csrc/engine/watchdog.cc"

# fmt: off
FAULTS = (
    Fault(
        "ops_fused", "a sum and a maximum are reduced together", EXECUTOR,
        "std::tuple(f.dtype, f.op, f.prescale, f.postscale)",
        "std::tuple(f.dtype, ReduceOp::kSum, f.prescale, f.postscale)",
        tests=("collectives/test_grouped.py", "collectives/test_handles.py"),
    ),
    Fault(
        "not_divided", "an average is a sum", EXECUTOR,
        "reduction.scaling.divisor = communicator.size();",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "root_keeps_its_own", "the root's output of a broadcast is not written", EXECUTOR,
        "f.root == communicator_.rank() && request.output != request.input", "false",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "equal_parts", "the parts of a small reducescatter count as equal", EXECUTOR,
        "begin += scattered_count(f, rank) * size_of(f.dtype);",
        "begin += scattered_count(f, 0) * size_of(f.dtype) + 0 * rank;",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "first_rows", "each rank gets the first rows of a small alltoall", EXECUTOR,
        "std::accumulate(rows, rows + communicator_.rank(), std::int64_t{0})", "std::int64_t{0}",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "not_unpacked", "fused results stay in the fusion buffer", EXECUTOR,
        "buffers_.copy(unpacking, reduction.dtype);",
        tests=("cpp:engine, ",),
    ),
    Fault(
        "numbers_go_on", "requests are not numbered anew after a barrier", DRIVER,
        "if (decision.resets_numbering) reset_numbering();",
        tests=("collectives/test_consistency.py", "collectives/test_handles.py"),
    ),
    Fault(
        "name_twice", "two requests of one name may be in flight", QUEUE,
        "!in_flight_.emplace(work.key_, &work).second", "false",
        tests=("cpp:queue_keeps_a_name",),
    ),
    Fault(
        "failure_untold", "the others do not hear why a rank has failed", WATCHDOG,
        "if (plane_ != nullptr) plane_->fail(set_, cause);",
        tests=("cpp:watchdog_",),
    ),

    Fault(
        "column_of_first", "a large alltoall expects the rows that rank 0 gets", EXECUTOR,
        "decision.rows[from * size + static_cast<std::size_t>(communicator_.rank())]",
        "decision.rows[from * size]",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "stall_untold", "nobody is told of a rank that is late", DRIVER,
        "is_over(now - since, config_.stall_warning)", "false",
        tests=("cpp:stall_warning",),
    ),
    Fault(
        "no_timeout", "TORCH_RING_TIMEOUT ends no wait", DRIVER,
        "is_over(waited, timeout) && is_over(now - last_progress(work), timeout)", "false",
        tests=("cpp:stall_warning",),
    ),
    Fault(
        "late_ready", "a warning names late ranks as ready", DRIVER,
        "std::ranges::find(unready, static_cast<int>(rank)) != unready.end()", "false",
        tests=("cpp:stall_warning",),
    ),
    Fault(
        "late_mismatch", "ranks that disagree beside other threads run into the timeout", DRIVER,
        "waited >= config_.grace_before_timeout()", "waited >= config_.other_threads_grace",
        tests=("cpp:before_the_timeout",),
    ),
    Fault(
        "wrong_last", "a rank that posted last counts as late for any operation", WATCHDOG,
        "is_one ? last : -1", "last",
        tests=("cpp:lateness_",),
    ),
    Fault(
        "reserved_name", "a program may take a name that the engine makes", QUEUE,
        "request.fingerprint.name.starts_with('#')", "false",
        tests=("cpp:queue_refuses",),
    ),
    Fault(
        "names_stay", "a group that is refused blocks the names of its other tensors", QUEUE,
        "for (std::size_t earlier = 0; earlier < i; ++earlier) "
        "in_flight_.erase(works[earlier]->key_);",
        tests=("cpp:queue_takes_a_group",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/collectives", "tests/world"))
