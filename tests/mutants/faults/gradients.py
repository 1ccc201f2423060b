# SPDX-License-Identifier: Apache-2.0
"""Faults of gradients: their hooks, buckets, agreement and reduction."""

from __future__ import annotations

from faults.fault import Fault, Room

HOOKS = "csrc/gradients/gradient_hooks.cc"
PARAMETER = "csrc/gradients/hooked_parameter.cc"
FINITE = "csrc/gradients/finite_check.cc"
AHEAD = "csrc/gradients/run_ahead.cc"
END = "csrc/gradients/end_pass.cc"
PASS = "csrc/gradients/pass_agreement.cc"
SYNC = "torch_ring/optimizer/backward_sync.py"
REDUCER = "torch_ring/optimizer/reducer.py"
REPORT = "csrc/gradients/report.cc"
DECIDE = "csrc/gradients/decide.cc"
PLANNED = "torch_ring/optimizer/planned_pass.py"
BUCKETS = "torch_ring/optimizer/buckets.py"
WIRE = "torch_ring/optimizer/bucket_wire.py"
WEIGHTS = "torch_ring/optimizer/weight_comparison.py"

CARRIED = ("optimizer/test_carried_gradients.py", "optimizer/test_join_in_training.py")
SLOTS = (
    "optimizer/test_shared_parameters.py",
    "model/test_programs.py::test_a_shared_trunk",
    "model/test_programs.py::test_one_of_two_optimizers",
)
ON_DOUBLE = ("device/test_carried_on_double.py",)
RANDOM = ("device/test_random_device_programs.py",)

# fmt: off
FAULTS = (
    # --- averaged and open parts
    Fault(
        "carried_sent", "an averaged part is sent again", HOOKS,
        "parameter.refresh();\n  parameter.carry();",
        tests=CARRIED,
    ),
    Fault(
        "carried_lost", "an averaged part is not added to the new average", HOOKS,
        "add_to(parameter.bucket_view, parameter.averaged.value());",
        tests=CARRIED,
    ),
    Fault(
        "carried_hidden", "a gradient that is not reduced yet lacks its averaged part", HOOKS,
        "\n    parameter.rejoin();\n",
        tests=CARRIED,
    ),
    Fault(
        "rejoined_sent", "an averaged part that was put back is sent", PARAMETER,
        "grad.sub_(value_.to(grad.device()));",
        tests=CARRIED,
    ),
    Fault(
        "failed_closed", "what autograd added in a failed pass counts as averaged", PARAMETER,
        "unreduced = variable.grad().defined();",
        "if (!unreduced) averaged.become_whole();",
        tests=CARRIED,
    ),
    Fault(
        "change_unseen", "a change of both parts counts as one of the open part", PARAMETER,
        "is_known && version_of(grad) == noted_", "is_known",
        tests=CARRIED,
    ),
    Fault(
        "change_missed", "a pass does not look for changes of the one before", HOOKS,
        "\n    note_changes();",
        tests=CARRIED,
    ),
    Fault(
        "change_summed", "a sum counts an averaged part that was changed n times", PARAMETER,
        "grad.defined() && sums && carries_value() && !is_zero_everywhere(grad)", "false",
        tests=CARRIED,
    ),
    Fault(
        "change_refused", "a sum refuses a gradient that was zeroed", PARAMETER,
        "carries_value() && !is_zero_everywhere(grad)", "carries_value()",
        tests=CARRIED,
    ),
    Fault(
        "replaced_added", "an averaged part is added to a gradient that a hook has set", PARAMETER,
        "if (!is_known()) return averaged.forget();  ",
        tests=CARRIED,
    ),
    Fault(
        "undoubted", "after join() ranks keep averages that differ", DECIDE,
        "unsure |= report->unsure;",
        tests=("optimizer/test_decide.py", *CARRIED),
    ),
    Fault(
        "plain_unlike", "a plain pass takes averaged parts for alike that may differ", END,
        "!reduction.unlike.any()", "true",
        tests=CARRIED,
    ),
    Fault(
        "undoubted_after_join", "ranks do not doubt their averages after join()", SYNC,
        "reducer.hooks.doubt_averages()", "pass",
        tests=CARRIED,
    ),
    Fault(
        "failed_unseen", "a step after a failed pass uses gradients of this rank", HOOKS,
        "pass_.has_failed = failed && "
        "std::ranges::any_of(parameters_, &HookedParameter::unreduced);",
        tests=("optimizer/test_interrupted_backward.py",),
    ),
    Fault(
        "promise_broken", "an interrupted rank drops what it has told the others", SYNC,
        "if each.carried & ~present:", "if False:",
        tests=("optimizer/test_interrupted_backward.py",),
    ),
    Fault(
        "reduction_interrupted", "Ctrl-C ends a reduction half-way", SYNC,
        "        with interrupt_deferred():\n            self.agreement.begin_reduction()",
        "        if True:\n            self.agreement.begin_reduction()",
        tests=("optimizer/test_nested_backward.py",),
    ),
    Fault(
        "rest_forgotten", "gradients that an earlier report lacks are not left to the step", SYNC,
        "        if sent is not None:\n            for rest",
        "        if False:\n            for rest",
        tests=("optimizer/test_interrupted_backward.py",),
    ),
    Fault(
        "ahead_changed", "in a planned pass a changed average is sent", PLANNED,
        "lacking &= ~(pending[index].carried if index in pending else 0)", "pass",
        tests=ON_DOUBLE,
    ),
    Fault(
        "fresh_forgets", "an averaged part is lost if autograd makes another tensor", HOOKS,
        "(fresh || parameter.averaged.is_whole()) && !parameter.averaged.is_apart()",
        "fresh || parameter.averaged.is_whole()",
        tests=("optimizer/test_sparse_gradients.py", *CARRIED),
    ),
    Fault(
        "average_unscaled", "an average that step() sends again is multiplied by Sum", HOOKS,
        "parameter.rescale_averaged(scale);\n      parameter.copy_in(copies);",
        "parameter.copy_in(copies);",
        tests=CARRIED,
    ),
    Fault(
        "sparse_carried_lost", "a sparse averaged part is not added again", HOOKS,
        "add_to(grad, parameter.averaged.value());",
        tests=("optimizer/test_sparse_gradients.py",),
    ),
    Fault(
        "carried_nan_unseen", "a NaN in an averaged part is forgotten", FINITE,
        "if (!values.defined()) continue;",
        "if (!values.defined() || values.is_same(parameters[i].averaged.value())) continue;",
        tests=CARRIED,
    ),
    Fault(
        "carried_not_taken_over", "an averaged part stays in the slot before", PARAMETER,
        "averaged = other.averaged;",
        tests=("optimizer/test_shared_parameters.py", "optimizer/test_changed_parameters.py"),
    ),
    Fault(
        "plain_rejoined_sent", "a plain pass sends averaged parts that were put back", END,
        "hooks_->carry(reduction.carried);",
        tests=CARRIED,
    ),
    Fault(
        "unlike_kept", "averaged parts that not all ranks have stay as they are", REDUCER,
        "for parameter in _members(unlike):", "for parameter in ():",
        tests=CARRIED,
    ),
    Fault(
        "average_not_dropped", "a rank keeps an average that the others have dropped", REDUCER,
        "self.hooks.drop_averaged(touched & ~due & ~carried)", "pass",
        tests=CARRIED,
    ),
    Fault(
        "not_due_stays", "an average that one rank alone has stays", DECIDE,
        "carried |= report->due & report->carried;", "carried |= report->carried;",
        tests=("optimizer/test_decide.py",),
    ),
    Fault(
        "unlike_unseen", "averages that not all ranks have count as alike", DECIDE,
        "on_all = on_all & report->carried;",
        tests=("optimizer/test_decide.py",),
    ),
    Fault(
        "filled_averages", "a planned gradient that a rank lacks is its average", HOOKS,
        "parameter.averaged.value().defined() || !due.get(i)",
        "parameter.averaged.value().defined()",
        tests=ON_DOUBLE,
    ),
    Fault(
        "ahead_not_dropped", "in a planned pass a rank keeps what the others dropped", PLANNED,
        "reducer.hooks.drop_averaged(of_any & ~gradients.get(index, 0) & ~stays)", "pass",
        tests=ON_DOUBLE,
    ),
    Fault(
        "ahead_unlike", "in a planned pass averages that differ are not refused", PLANNED,
        "self._require_carried_alike(ranks, decision)", "pass",
        tests=ON_DOUBLE,
    ),
    Fault(
        "ahead_unlike_late", "... or only in the next pass, after a step", PLANNED,
        "adds = any(each.due & each.carried for each in started.values())", "adds = False",
        tests=ON_DOUBLE,
    ),
    # --- hooks and passes
    Fault(
        "counts_twice", "a hook counts a pass twice", HOOKS,
        "  ++parameter.passes;\n", "parameter.passes += 2;",
        tests=("optimizer/test_accumulation.py",),
    ),
    Fault(
        "not_unreduced", "a hook does not note that the gradient is to be reduced", HOOKS,
        "parameter.unreduced = true;\n"
        "  if (step_.is_synchronizing && due(parameter)) options_.agreement->arrive();",
        "if (step_.is_synchronizing && due(parameter)) options_.agreement->arrive();",
        tests=("optimizer/test_accumulation.py",),
    ),
    Fault(
        "no_order", "a hook does not note when the gradient came", HOOKS,
        "pass_.arrived.push_back(index);",
        tests=("optimizer/test_buckets.py", "optimizer/test_distributed_optimizer.py"),
    ),
    Fault(
        "launched_early", "a bucket is sent before its last gradient", HOOKS,
        "--bucket.missing > 0", "--bucket.missing > 1",
        tests=("model/test_programs.py::test_the_loop_of_every_tutorial", *RANDOM),
    ),
    Fault(
        "sent_in_no_sync", "a bucket is sent in no_sync()", HOOKS,
        "!step_.is_synchronizing || !due(parameter)", "!due(parameter)",
        tests=("optimizer/test_accumulation.py",),
    ),
    Fault(
        "sent_with_sparse", "a sparse gradient fills a bucket", HOOKS,
        "parameter.sparse.defined()", "false",
        tests=("optimizer/test_sparse_gradients.py",),
    ),
    Fault(
        "sent_though_repeated", "a bucket is sent although a gradient may come again", HOOKS,
        "may_get_late(bucket)", "false",
        tests=("device/test_run_ahead_errors.py",),
    ),
    Fault(
        "lock_dropped", "enter_pass() returns without its lock", HOOKS,
        "queue_end(number);\n    lock.lock();", "queue_end(number);",
        tests=("optimizer/test_failed_backward.py",),
    ),
    Fault(
        "two_threads", "a pass in another thread is not noticed", HOOKS,
        "options_.agreement->is_ending_elsewhere() || pass_.graph->is_beside(current)", "false",
        tests=("optimizer/test_threads.py",),
    ),
    Fault(
        "failed_pass_stays", "a failed pass is not closed before a step", HOOKS,
        "if (is_of_step) close_failed();",
        tests=("device/test_run_ahead_errors.py",),
    ),
    Fault(
        "sent_in_vain", "a pass that failed after it had sent a bucket is forgotten", HOOKS,
        "pass_.is_sent_in_vain = pass_.is_sent_in_vain || pass_.is_sent;",
        tests=("optimizer/test_failed_backward.py",),
    ),
    Fault(
        "given_up_untold", "a pass that one rank gives up is not told to the others", HOOKS,
        "options_.agreement->give_up(failure_in(pass_.end), pass_.is_sent);",
        tests=("optimizer/test_failed_backward.py",),
    ),
    Fault(
        "overwrites_sent", "a late gradient is added to a bucket that is on its way", HOOKS,
        "if (!buckets_[parameter.bucket].is_sent) return;", "return;",
        tests=("optimizer/test_nested_backward.py",),
    ),
    Fault(
        "late_one_lost", "of two late gradients only the last one counts", HOOKS,
        "kept = kept.defined() ? kept.add(mine) : mine;", "kept = mine;",
        tests=("optimizer/test_nested_backward.py",),
    ),
    Fault(
        "late_one_dropped", "a late gradient is dropped", HOOKS,
        "grad.add_(kept.to(grad.device()));",
        tests=("optimizer/test_nested_backward.py", "device/test_run_ahead_apart.py"),
    ),
    # --- zero_grad() and gradients by hand
    Fault(
        "passes_stay", "zero_grad() and step() do not reset the count of passes", HOOKS,
        "parameter.passes = 0;\n  parameter.refresh();\n  parameter.version.reset();",
        "parameter.refresh(); parameter.version.reset();",
        tests=("optimizer/test_accumulation.py",),
    ),
    Fault(
        "writes_missed", "a write into an averaged gradient is not reduced", HOOKS,
        "everything && !was_reduced && parameter.written_by_hand()", "false",
        tests=("optimizer/test_gradients_by_hand.py",),
    ),
    Fault(
        "by_hand_missed", "a gradient set by hand is not reduced", HOOKS,
        "everything && parameter.may_be_by_hand(was_reduced)", "false",
        tests=("model/test_programs.py::test_gradients_set_beside_backward",),
    ),
    Fault(
        "not_written_back", "the program's own gradient memory does not get the average", HOOKS,
        "parameter.write_back(copies);",
        tests=("optimizer/test_gradients_by_hand.py",),
    ),
    # --- one slot a parameter
    Fault(
        "two_slots", "the older optimizer's hook takes the gradient, too", HOOKS,
        "if (is_elsewhere(index)) return;",
        tests=SLOTS,
    ),
    Fault(
        "slot_empty", "the later optimizer gets no gradient from the older one", HOOKS,
        "slot.take_over(parameters_.at(index), owner.step_.passes);",
        tests=SLOTS,
    ),
    Fault(
        "others_step", "the older optimizer's step averages what the later one has stepped with",
        HOOKS, "stepped.get(i) ? began : step_.began", "step_.began",
        tests=SLOTS,
    ),
    Fault(
        "slot_not_stepped", "a step leaves gradients in slots of another optimizer", HOOKS,
        "which == Due::kEverything || stepped.get(i)", "which == Due::kEverything",
        tests=SLOTS,
    ),
    Fault(
        "slot_settled", "a gradient in another optimizer's slot counts as averaged", HOOKS,
        "parameter.reduced_at > since", "true",
        tests=(*SLOTS, "optimizer/test_gradients_by_hand.py"),
    ),
    Fault(
        "slot_not_reset", "zero_grad() and step() leave a slot elsewhere as it is", HOOKS,
        "for (const auto& [index, there] : elsewhere) "
        "there.hooks->reset_slot(there.index, gradients);",
        tests=SLOTS,
    ),
    Fault(
        "slot_leaves", "a slot does not outlive its optimizer", SYNC,
        "if any(reducer in each.owners() for each in _living_reducers()):", "if False:",
        tests=SLOTS,
    ),
    Fault(
        "slot_in_no_sync", "no_sync() does not hold a slot whose optimizer is gone", HOOKS,
        "if (there.hooks->is_left_) there.hooks->set_synchronizing(synchronizing);",
        tests=SLOTS,
    ),
    Fault(
        "slot_sent_twice", "a bucket that is sent early has the slots of others, too", REDUCER,
        "own &= ~(1 << elsewhere)", "pass",
        tests=SLOTS,
    ),
    Fault(
        "slot_pending", "a pass leaves the step of an optimizer whose slot is elsewhere", SYNC,
        "if each is reducer or (each.elsewhere and reducer in each.owners()):",
        "if each is reducer:",
        tests=SLOTS,
    ),
    Fault(
        "slot_decided", "an optimizer does not ask for what is open in its slots elsewhere", SYNC,
        "if there & (left if is_mentioned else mentioned):", "if False:",
        tests=SLOTS,
    ),
    # --- the report and the reduction
    Fault(
        "complete_lies", "a missing gradient is not reported before a step", HOOKS,
        "pending.complete = false;",
        tests=("optimizer/test_gradients_by_hand.py", "model/test_programs.py"),
    ),
    Fault(
        "accumulating_untold", "accumulated gradients are not reported", HOOKS,
        "pending.accumulating = true;",
        tests=("optimizer/test_accumulation.py", "optimizer/test_uneven_batches.py"),
    ),
    Fault(
        "sparse_untold", "a sparse gradient is reported as a dense one", HOOKS,
        "if (grad.is_sparse()) pending.sparse.set(i);",
        tests=("optimizer/test_sparse_gradients.py",),
    ),
    Fault(
        "checked_late", "a gradient is checked for NaN after its bucket was sent", HOOKS,
        "if (bucket_full && finite_.is_on()) "
        "finite_.examine(parameters_, buckets_[bucket].members);",
        tests=("optimizer/test_nan_check.py",),
    ),
    Fault(
        "not_reduced", "an averaged gradient still counts as to be reduced", HOOKS,
        "parameter.be_reduced(now);\n    parameter.release_to_grad();",
        "parameter.release_to_grad();",
        tests=("optimizer/test_accumulation.py",),
    ),
    Fault(
        "kept_overwritten", "a gradient tensor that the program keeps is overwritten", HOOKS,
        "if (!parameters_[index].would_overwrite_kept()) return;", "return;",
        tests=("optimizer/test_gradients_by_hand.py",),
    ),
    Fault(
        "zero_missing", "a missing gradient counts as the bucket's old content", PARAMETER,
        "copies.zero(bucket_view);",
        tests=("optimizer/test_dynamic_graphs.py",),
    ),
    Fault(
        "alias_taken", "autograd's memory is used although others refer to it", PARAMETER,
        "if (!has_one_owner(gradient)) return 0;",
        tests=("optimizer/test_direct_gradients.py",),
    ),
    Fault(
        "stream_not_followed", "a bucket is sent before another stream has filled it", HOOKS,
        "if (!device.is_cpu()) buckets_[bucket].producers.join(current_stream(device));",
        tests=("device/test_gradient_streams.py",),
    ),
    Fault(
        "plain_out_of_step", "a plain pass does not compare the ranks' steps", END,
        "!decision.out_of_step", "true",
        tests=("optimizer/test_plain_passes.py",),
    ),
    Fault(
        "plain_digests", "a plain pass does not compare the ranks' weights", END,
        "!decision.has_digests", "true",
        tests=("optimizer/test_different_weights.py",),
    ),
    Fault(
        "plain_parts", "a plain pass sends a bucket of which no rank has a part", END,
        "!touched.any() || touched == bucket", "true",
        tests=("optimizer/test_plain_passes.py",),
    ),
    Fault(
        "plain_not_finite", "a plain pass forgets the NaN in the reports", END,
        "reduction.not_finite.empty()", "true",
        tests=("optimizer/test_nan_check.py",),
    ),
    Fault(
        "plain_not_dropped", "in a plain pass a rank keeps what the others dropped", END,
        "hooks_->drop_averaged(reduction.touched - due - reduction.carried);",
        tests=CARRIED,
    ),
    Fault(
        "plain_open", "after a plain pass a step leaves gradients that another rank has", END,
        "decision_.open.empty() && decision_.incomplete.empty()",
        "decision_.incomplete.empty()",
        tests=("optimizer/test_plain_passes.py",),
    ),
    Fault(
        "plain_incomplete", "after a plain pass a step leaves gradients set by hand", END,
        "decision_.open.empty() && decision_.incomplete.empty()",
        "decision_.open.empty()",
        tests=("optimizer/test_plain_passes.py",),
    ),
    Fault(
        "unchecked", "gradients are not examined before they are sent", HOOKS,
        "finite_.not_finite(parameters_, pending.due, rank)", "std::vector<NotFinite>()",
        tests=("optimizer/test_nan_check.py",),
    ),
    Fault(
        "open_after_error", "an agreement that failed is continued by the next pass", PASS,
        "open_.reset();\n    reports_.reset();\n    throw;", "throw;",
        tests=("optimizer/test_uneven_batches.py::test_a_rank_in_another_collective",),
    ),
    # --- running ahead
    Fault(
        "ready_ignored", "a bucket is launched on a stream that does not wait for it", AHEAD,
        "written.begin();",
        tests=("device/test_gradient_streams.py", *RANDOM),
    ),
    Fault(
        "no_stand_in", "a joined rank launches nothing for the others", AHEAD,
        "launch_plain(engine_, state.runs[i], run, run, ready);",
        tests=("device/test_run_ahead_apart.py", *RANDOM),
    ),
    Fault(
        "not_restored", "a planned gradient that no rank had is not restored", HOOKS,
        "if (nowhere.get(index)) restore_one(parameters_[index], before);",
        tests=("device/test_run_ahead_apart.py", *RANDOM),
    ),
    Fault(
        "unplanned_lost", "a gradient that only some ranks have is not refused", PLANNED,
        "if not self._all_deviate(ranks):", "if False:",
        tests=("device/test_run_ahead_apart.py", *RANDOM),
    ),
    Fault(
        "unplanned_refused", "a gradient is refused although all ranks know of it", PLANNED,
        "if not self._all_deviate(ranks):",
        "if decision.out_of_step is None:",
        tests=("device/test_run_ahead_apart.py", *RANDOM),
    ),
    Fault(
        "old_report", "the reports of the pass before are not read", PLANNED,
        "ends = any(self._judge(entered) for entered in before)", "ends = False",
        tests=("device/test_run_ahead_apart.py", *RANDOM),
    ),
    Fault(
        "rest_unreduced", "gradients that are new on all ranks stay each rank's own", PLANNED,
        "self._reducers.reduce(decision, gradients, number, len(entered.ranks), planned)", "pass",
        tests=("device/test_run_ahead_apart.py", *RANDOM),
    ),
    # --- the decision
    Fault(
        "last_rank_only", "the gradients of the last rank decide what is reduced", DECIDE,
        "if (counts) of_optimizer.touched |= report.due;",
        "if (counts) of_optimizer.touched = report.due;",
        tests=("optimizer/test_decide.py",),
    ),
    Fault(
        "dense_as_sparse", "a gradient that is dense on one rank is reduced as sparse", DECIDE,
        "dense |= report->due - report->sparse;",
        "if (!dense.any()) dense = report->due - report->sparse;",
        tests=("optimizer/test_decide.py",),
    ),
    Fault(
        "stepping_too_early", "gradients of a stepping rank are reduced in the others' pass",
        DECIDE, "decision.is_of_step || !rank->is_of_step() || rank->plan != 0", "true",
        tests=("optimizer/test_decide.py",),
    ),
    Fault(
        "stepping_forgotten", "gradients of a stepping rank that wait are not open", DECIDE,
        "report->accumulating || report->late || waits", "report->accumulating || report->late",
        tests=("optimizer/test_decide.py",),
    ),
    Fault(
        "order_after_join", "the ranks plan buckets in an order that a joined one does not know",
        DECIDE, "decision.is_whole && report.optimizer == optimizer",
        "report.optimizer == optimizer",
        tests=("optimizer/test_decide.py",),
    ),
    Fault(
        "steps_mixed", "the ranks' different steps are not noticed", SYNC,
        "require_same_steps(ranks, decision.out_of_step, self._size)", "pass",
        tests=("optimizer/test_failed_backward.py",),
    ),
    Fault(
        "given_up_ignored", "a pass that some ranks have given up is reduced", SYNC,
        "if decision.given_up:", "if False:",
        tests=("optimizer/test_failed_backward.py",),
    ),
    Fault(
        "nothing_left", "a step does not ask for gradients that are left", SYNC,
        "not (index in left or index in incomplete)", "True",
        tests=("optimizer/test_accumulation.py",),
    ),
    Fault(
        "other_stepped", "a step of one optimizer leaves the other without an agreement", SYNC,
        "                other.nothing_pending = False", "                pass",
        tests=("optimizer/test_shared_parameters.py",),
    ),
    Fault(
        "own_order", "each rank plans its buckets by its own order", REDUCER,
        "layout.set_order(order)", "layout.set_order(self.hooks.ready_order())",
        tests=("optimizer/test_uneven_batches.py", "optimizer/test_buckets.py"),
    ),
    Fault(
        "incomplete_untold", "the report leaves out that gradients are missing", REPORT,
        "if (report.incomplete) flags |= kIncomplete;",
        tests=("optimizer/test_decide.py", "optimizer/test_gradients_by_hand.py"),
    ),
    Fault(
        "sparse_not_coalesced", "rows of a sparse gradient count several times", REDUCER,
        "return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()",
        "return gradient if gradient.is_sparse else gradient.to_sparse(1)",
        tests=("optimizer/test_sparse_gradients.py",),
    ),
    Fault(
        "stays_dense", "sparse_as_dense leaves a dense gradient", REDUCER,
        "for parameter in _members(self._sparse):", "for parameter in ():",
        tests=("optimizer/test_sparse_gradients.py",),
    ),
    Fault(
        "finished_early", "finish() does not wait for the second stage of a compressor", REDUCER,
        "while unfinished:", "if unfinished:",
        tests=("compression/test_compressed_training.py",),
    ),
    Fault(
        "not_finite_dropped", "a NaN is forgotten when the gradient is reduced again", REDUCER,
        "if not touched >> parameter & 1 or parameter in added_to",
        "if not touched >> parameter & 1",
        tests=("optimizer/test_nan_check.py",),
    ),
    # --- buckets and wires
    Fault(
        "run_too_long", "a run of touched gradients takes the next one, too", BUCKETS,
        "extends = bool(touched >> slot.parameter & 1)", "extends = True",
        tests=("optimizer/test_buckets.py",),
    ),
    Fault(
        "unaligned", "gradients of a bucket share cache lines", BUCKETS,
        "return -(-self.numel // alignment) * alignment", "return self.numel",
        tests=("optimizer/test_buckets.py",),
    ),
    Fault(
        "predivided_wrong", "gradient_predivide_factor changes the average", WIRE,
        "return Sum, 1.0 / self.predivide_factor, self.predivide_factor / size",
        "return Sum, 1.0 / self.predivide_factor, 1.0 / size",
        tests=("optimizer/test_distributed_optimizer.py",),
    ),
    Fault(
        "cast_lost", "the result of a cast bucket is not copied back", WIRE,
        "part.copy_(work.wait())", "work.wait()",
        tests=("optimizer/test_distributed_optimizer.py",),
    ),
    Fault(
        "digest_once", "weights are compared at the first gradients only", WEIGHTS,
        "return steps in _FIRST_STEPS or (steps > 0 and steps % _EVERY == 0)", "return False",
        tests=("optimizer/test_different_weights.py",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/model", "tests/optimizer", "tests/compression"), ("tests/device",))
