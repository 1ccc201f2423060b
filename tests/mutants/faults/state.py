# SPDX-License-Identifier: Apache-2.0
"""Faults of state: broadcasts, checkpoints, means, schedules, batch normalisation."""

from __future__ import annotations

from faults.fault import Fault, Room

STATE = "torch_ring/state.py"
CHECKPOINT = "torch_ring/checkpoint.py"
METRICS = "torch_ring/metrics.py"
SCHEDULES = "torch_ring/lr_schedules.py"
LOADED = "torch_ring/optimizer/loaded_rate.py"
NORM = "torch_ring/sync_batch_norm.py"

# fmt: off
FAULTS = (
    Fault(
        "names_not_compared", "ranks with other parameters are not refused", STATE,
        """    require_same(
        sorted(f"parameter '{name}' {value.dtype} {list(value.shape)}" for name, value in tensors),
        "the ranks have different parameters",
        process_set,
    )
""", "",
        tests=("state/test_broadcast_state.py",),
    ),
    Fault(
        "bytes_not_sent", "a tensor of an unusual dtype is refused", STATE,
        "return tensor.view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor", "return tensor",
        tests=("state/test_broadcast_state.py::test_broadcast_parameters",),
    ),
    Fault(
        "dtype_not_compared", "a buffer of another dtype is not refused", STATE,
        "[f\"buffer '{name}' {buffer.dtype} {list(buffer.shape)}\" for name, buffer in "
        "named.items()]",
        "[f\"buffer '{name}' {list(buffer.shape)}\" for name, buffer in named.items()]",
        tests=("state/test_broadcast_state.py",),
    ),
    Fault(
        "old_state_kept", "an optimizer keeps state that the root's does not have", STATE,
        "        optimizer.state.clear()\n", "",
        tests=("state/test_broadcast_state.py",),
    ),
    Fault(
        "hyper_lost", "hyper-parameters of the root's optimizer are lost", STATE,
        "            group.update(values)\n", "            pass\n",
        tests=("state/test_broadcast_state.py::test_broadcast_optimizer_state",),
    ),
    Fault(
        "hyper_kept", "an optimizer keeps hyper-parameters that the root's does not have", STATE,
        "                del group[key]\n", "                pass\n",
        tests=("state/test_broadcast_state.py::test_broadcast_optimizer_state",),
    ),
    Fault(
        "metadata_lost", "a state dict loses its metadata on the other ranks", STATE,
        "    if type(value) is dict:\n        return items\n    same = copy.copy(value)",
        "    return items\n    same = copy.copy(value)",
        tests=("state/test_checkpoint.py", "state/test_broadcast_state.py"),
    ),
    Fault(
        "no_gradients", "a parameter without a gradient has none after a broadcast", STATE,
        "parameter.grad = torch.zeros_like(parameter)", "pass",
        tests=("state/test_broadcast_state.py::test_gradients_exist_after_a_broadcast",),
    ),
    Fault(
        "written_in_place", "a killed job leaves half a checkpoint", CHECKPOINT,
        'unfinished = path.with_name(f"{path.name}.unfinished")', "unfinished = path",
        tests=("state/test_checkpoint.py::test_a_killed_job_leaves_the_previous_checkpoint",),
    ),
    Fault(
        "unfinished_stays", "a checkpoint that failed leaves a file behind", CHECKPOINT,
        "        unfinished.unlink(missing_ok=True)\n        raise", "        raise",
        tests=("state/test_checkpoint.py",),
    ),
    Fault(
        "unread", "save() leaves a file that load() refuses", CHECKPOINT,
        "_read(unfinished, mmap=True)", "pass",
        tests=("state/test_checkpoint.py::test_a_file_that_was_saved_can_be_loaded",),
    ),
    Fault(
        "code_run", "a checkpoint may run code", CHECKPOINT,
        "weights_only=True, mmap=mmap", "weights_only=False, mmap=mmap",
        tests=("state/test_checkpoint.py::test_a_checkpoint_runs_no_code_of_its_file",),
    ),
    Fault(
        "error_of_root_only", "the other ranks do not hear that a checkpoint failed", CHECKPOINT,
        "    complaint = broadcast_object(complaint, root, None, process_set)\n", "",
        tests=("state/test_checkpoint.py",),
    ),
    Fault(
        "default_for_damage", "a missing file is no error", CHECKPOINT,
        "        if may_miss:\n            return False, None\n        raise",
        "        return False, None",
        tests=("state/test_checkpoint.py",),
    ),
    Fault(
        "rank_0_writes", "rank 0 writes the checkpoint of a set without it", CHECKPOINT,
        "return (process_set.ranks or [0])[0]", "return 0",
        tests=("state/test_checkpoint.py::test_the_first_of_a_process_set_writes",),
    ),
    Fault(
        "not_rescaled", "a schedule's state goes on at the wrong epoch", SCHEDULES,
        "self.last_epoch = round(self.last_epoch * steps_per_epoch / self.steps_per_epoch)", "pass",
        tests=("state/test_lr_schedules.py::test_a_state_fits_another_number_of_ranks",),
    ),
    Fault(
        "warm_up_from_zero", "a warm-up begins at a rate of 0", SCHEDULES,
        "return 1 + (scale - 1) * epoch / warmup", "return scale * epoch / warmup",
        tests=("state/test_lr_schedules.py",),
    ),
    Fault(
        "rate_replaced", "a rate in a tensor is replaced by a number", SCHEDULES,
        'if isinstance(group["lr"], Tensor):', "if False:",
        tests=("state/test_lr_schedules.py::test_groups_and_rates_in_tensors",),
    ),
    Fault(
        "samples_of_one", "a schedule counts the samples of one rank", SCHEDULES,
        "self.samples += samples * self._scaling.size(self.optimizer)", "self.samples += samples",
        tests=("state/test_scaled_lr.py",),
    ),
    Fault(
        "old_rate_loaded", "an optimizer's state brings back the rate of its ranks", SCHEDULES,
        "optimizer.register_load_state_dict_post_hook(self.apply)", "pass",
        tests=("state/test_scaled_lr.py::test_every_kind_of_schedule",),
    ),
    Fault(
        "no_load_hooks", "an optimizer without load hooks steps with the rate of other ranks",
        SCHEDULES, "optimizer.register_step_pre_hook(lambda stepping, *_: self.apply(stepping))",
        "",
        tests=(
            "state/test_scaled_lr.py::"
            "test_states_of_other_ranks_and_of_plain_schedulers_in_any_order",
        ),
    ),
    Fault(
        "rate_before_newcomer", "a newcomer's rates are not those of the ranks that were there",
        SCHEDULES,
        "        self._scaling.apply(self.optimizer)\n        return {\n", "        return {\n",
        tests=("state/test_scaled_lr.py::test_rates_follow_the_ranks_when_one_comes",),
    ),
    Fault(
        "changes_lost", "a schedule undoes the changes of a program", SCHEDULES,
        "note[_ONE] if rate == applied else rate / note[_SCALE]", "note[_ONE]",
        tests=("state/test_scaled_lr.py::test_plateaus_and_changes_by_hand",),
    ),
    Fault(
        "one_step_too_many", "samples that a sampler repeats end a OneCycleLR", SCHEDULES,
        "isinstance(scheduler, OneCycleLR) and scheduler.last_epoch >= scheduler.total_steps",
        "False",
        tests=("state/test_scaled_lr.py::test_samples_of_all_ranks_are_counted",),
    ),
    Fault(
        "passes_not_counted", "a schedule counts one backward pass of several", SCHEDULES,
        'getattr(self.optimizer, "backward_passes_per_step", 1)', "1",
        tests=("state/test_scaled_lr.py::test_samples_of_all_ranks_are_counted",),
    ),
    Fault(
        "scaled_twice", "a second ScaledLR multiplies the rates again", SCHEDULES,
        "if any(_SCALE in group for group in optimizer.param_groups):", "if False:",
        tests=("state/test_scaled_lr.py::test_what_cannot_be_scaled_is_refused",),
    ),
    Fault(
        "shared_twice", "an added group that shares the others' tensor is multiplied again",
        SCHEDULES, 'notes.get(id(group["lr"]), group)', "group",
        tests=("state/test_scaled_lr.py::test_added_groups_are_scaled",),
    ),
    Fault(
        "set_ignored", "a schedule has the ranks of all sets", SCHEDULES,
        "(own if self._process_set is None else self._process_set)",
        "(self._process_set or global_process_set)",
        tests=("state/test_scaled_lr.py::test_the_ranks_are_those_of_the_optimizer",),
    ),
    Fault(
        "silenced", "a warm-up to a factor of its own silences the rate of other ranks", SCHEDULES,
        "        if follows_ranks:\n", "        if True:\n",
        tests=("state/test_scaled_lr.py::test_a_rate_of_other_ranks_is_told",),
    ),
    Fault(
        "plain_not_told", "a rate of several ranks that ScaledLR multiplies is not told", LOADED,
        'right = ranks if all("lr_scale" in group for group in groups) else 1', "right = ranks",
        tests=("state/test_scaled_lr.py::test_a_rate_of_other_ranks_is_told",),
    ),
    Fault(
        "ranks_not_kept", "the rate of other ranks is not told", LOADED,
        "state_dict[RANKS] = self._process_set.size()", "pass",
        tests=("state/test_scaled_lr.py::test_a_rate_of_other_ranks_is_told",),
    ),
    Fault(
        "unsaid_ranks_not_told", "a plain rate that several ranks load is not told", LOADED,
        "            self._rates_before = _rates_of(optimizer)\n", "            pass\n",
        tests=("state/test_scaled_lr.py::test_a_rate_of_other_ranks_is_told",),
    ),
    Fault(
        "adapted_told", "a rate that a program has adapted is told", LOADED,
        "rates != self._rates", "False",
        tests=("state/test_scaled_lr.py::test_a_rate_of_other_ranks_is_told",),
    ),
    Fault(
        "local_variance", "batch normalisation forgets how far the ranks' means are apart", NORM,
        "squares = (squares + counts * (means - mean) ** 2).sum(0)", "squares = squares.sum(0)",
        tests=("state/test_sync_batch_norm.py::test_sync_batch_norm_equals_one_process",),
    ),
    Fault(
        "ranks_equal", "ranks with fewer samples weigh as much as the others", NORM,
        "mean = (counts * means).sum(0) / count", "mean = means.mean(0)",
        tests=("state/test_sync_batch_norm.py",),
    ),
    Fault(
        "biased_tracked", "the tracked variance is the biased one", NORM,
        "self._track(mean, variance * (count / (count - 1)))", "self._track(mean, variance)",
        tests=("state/test_sync_batch_norm.py",),
    ),
    Fault(
        "tracked_twice", "a checkpointed forward tracks a batch twice", NORM,
        "self.running_mean is not None and not is_again:", "self.running_mean is not None:",
        tests=("state/test_sync_batch_norm.py::test_checkpoints_track_a_batch_once",),
    ),
    Fault(
        "means_of_ranks", "a mean has the weight of a rank, not of its samples", METRICS,
        "(total + product, samples + weight)", "(total + given, samples + 1)",
        tests=("state/test_metrics.py",),
    ),
    Fault(
        "no_samples_nan", "a rank without samples makes the mean NaN", METRICS,
        "return value * weight if weight > 0 else 0.0", "return value * weight",
        tests=("state/test_metrics.py",),
    ),
    Fault(
        "sums_stay", "reset() does not forget the samples before it", METRICS,
        "self._sums = dict.fromkeys(self._sums, (0.0, 0.0))", "pass",
        tests=("state/test_metrics.py",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/state",))
