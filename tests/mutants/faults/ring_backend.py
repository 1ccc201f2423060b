# SPDX-License-Identifier: Apache-2.0
"""Faults of csrc/c10d: the operations of torch.distributed."""

from __future__ import annotations

from faults.fault import Fault, Room

REQUESTS = "csrc/c10d/c10d_requests.cc"
WORK = "csrc/c10d/ring_work.cc"

# fmt: off
FAULTS = (
    Fault(
        "factor_lost", "PREMUL_SUM is a sum", REQUESTS,
        "if (op.op_ != RedOp::PREMUL_SUM) return tensor;", "return tensor;",
        tests=("c10d/test_operations.py", "c10d/test_ddp.py"),
    ),
    Fault(
        "bools_summed", "the sum of bools wraps around", REQUESTS,
        "dtype == at::kBool ? ReduceOp::kMax : ReduceOp::kSum", "ReduceOp::kSum",
        tests=("c10d/test_operations.py",),
    ),
    Fault(
        "parts_unequal", "the parts of a gather may have other sizes than the input", REQUESTS,
        "part.numel() == own.numel()", "true",
        tests=("c10d/test_errors.py",),
    ),
    Fault(
        "not_copied_back", "strided outputs do not get the result", REQUESTS,
        "copy_to(tensor, flat_.narrow(0, offset, tensor.numel()));",
        tests=("c10d/test_operations.py",),
    ),
    Fault(
        "overlap_unseen", "an output that overlaps the input is written while that is read",
        REQUESTS,
        "overlaps && may_overlap(joined.flat_, *overlaps)", "false",
        tests=("c10d/test_operations.py",),
    ),
    Fault(
        "parents_groups", "a forked process uses its parent's groups", REQUESTS,
        "!home.is_here()", "false",
        tests=("c10d/test_forks.py",),
    ),
    Fault(
        "future_without_error", "the future of a failed operation has a value", WORK,
        "future_->setError(through_torch(known));",
        "future_->markCompleted(c10::IValue(operation_->outputs()));",
        tests=("c10d/test_errors.py",),
    ),
    Fault(
        "wait_without_timeout", "wait(timeout) waits for ever", WORK,
        "if (timeout > kNoTimeout) deadline = steady_clock::now() + timeout;",
        tests=("c10d/test_errors.py",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/c10d",))
