# SPDX-License-Identifier: Apache-2.0
"""Faults of elastic training: states, samplers, regrouping, leaving."""

from __future__ import annotations

from faults.fault import Fault, Room

STATE = "torch_ring/elastic/state.py"
SAMPLER = "torch_ring/elastic/sampler.py"
REGROUP = "torch_ring/elastic/regroup.py"
RETRY = "torch_ring/elastic/retry.py"
DRAIN = "torch_ring/elastic/drain.py"
JOB = "torch_ring/elastic/job.py"
ROUNDS = "torch_ring/optimizer/local_steps.py"

# fmt: off
FAULTS = (
    Fault(
        "state_not_copied", "a commit keeps the parameters themselves", STATE,
        "self._saved = copy.deepcopy(self.value.state_dict())",
        "self._saved = self.value.state_dict()",
        tests=("elastic/test_state.py",),
    ),
    Fault(
        "nearest_progress", "samplers go on from the rank that is farthest behind", STATE,
        "farthest = max(states,", "farthest = min(states,",
        tests=("elastic/test_state.py",),
    ),
    Fault(
        "step_twice", "a step that was taken before a death is taken again", STATE,
        "is_taken = self._again.get(name, 0) > 0", "is_taken = False",
        tests=("elastic/test_steps_of_a_batch.py",),
    ),
    Fault(
        "damage_unseen", "a damaged state is trained on", STATE,
        "if damage is not None:", "if False:",
        tests=("elastic/test_damaged_state.py",),
    ),
    Fault(
        "own_batch_only", "a sampler counts the samples of one rank", SAMPLER,
        "self.processed_num += batch_size * self.num_replicas", "self.processed_num += batch_size",
        tests=("elastic/test_state.py",),
    ),
    Fault(
        "two_worlds", "both halves of a divided job go on", REGROUP,
        "if not self._may_go_on():\n            raise", "if False:\n            raise",
        tests=("elastic/test_regroup.py",),
    ),
    Fault(
        "dead_counted", "a process that has died since it came is a survivor", REGROUP,
        "            if request.channel.is_closed():", "            if False:",
        tests=("elastic/test_regroup.py",),
    ),

    Fault(
        "deal_from_start", "after a change of the ranks an epoch begins again", SAMPLER,
        "self.remaining_indices = order[self.processed_num :]", "self.remaining_indices = order",
        tests=("elastic/test_state.py::test_a_sampler_deals_what_is_left",),
    ),
    Fault(
        "epoch_order", "all epochs have the same order", SAMPLER,
        "random.Random(self.seed + self.epoch)", "random.Random(self.seed)",
        tests=("elastic/test_state.py::test_a_sampler_deals_what_is_left",),
    ),
    Fault(
        "neighbour_samples", "two ranks get the same samples", SAMPLER,
        "indices=dealt[self.rank : self.total_size : self.num_replicas]",
        "indices=dealt[: self.total_size : self.num_replicas]",
        tests=("elastic/test_state.py::test_a_sampler_deals_what_is_left",),
    ),
    Fault(
        "progress_lost", "the state of a sampler loses the epoch", SAMPLER,
        'self.epoch = state_dict["epoch"]', "pass",
        tests=("elastic/test_state.py::test_a_sampler_deals_what_is_left",),
    ),
    Fault(
        "optimizer_not_restored", "a restore leaves the optimizer as it is", STATE,
        "self.value.load_state_dict(copy.deepcopy(self._saved))", "pass",
        tests=("elastic/test_state.py",),
    ),
    Fault(
        "attributes_shared", "a commit keeps the attributes themselves", STATE,
        "self._saved_state = copy.deepcopy(self._values)",
        "self._saved_state = dict(self._values)",
        tests=("elastic/test_state.py::test_commit_and_restore",),
    ),
    Fault(
        "nearest_state", "survivors go on from the rank that is farthest behind", STATE,
        "root = max(range(len(ranks)), key=lambda rank: ranks[rank].progress)",
        "root = min(range(len(ranks)), key=lambda rank: ranks[rank].progress)",
        tests=("elastic/test_state.py::test_a_rank_that_is_a_step_behind_takes_the_others_state",),
    ),
    Fault(
        "newcomer_counts", "a newcomer's state counts as a whole one", STATE,
        "self._parts, self._saved = NONE, None", "pass",
        tests=(
            "elastic/test_state.py::test_a_state_comes_from_a_rank_that_has_one",
            "elastic/test_two_functions.py",
        ),
    ),
    Fault(
        "mixed_counts", "a state of which a part is another's counts as whole", STATE,
        "if takes_another:\n            self._parts = PART",
        "if takes_another and self._parts == WHOLE:\n            self._parts = NONE",
        tests=("elastic/test_state.py::test_a_part_of_a_state_is_an_error_on_all_ranks",),
    ),
    Fault(
        "scheduler_first", "a scheduler's rate is overwritten by the optimizer's", STATE,
        "key=lambda handler: handler.is_small)", "key=lambda handler: not handler.is_small)",
        tests=("elastic/test_state.py::test_what_has_a_state_dict_is_saved_and_given",),
    ),
    Fault(
        "interrupt_of_one", "only rank 0 hears that hosts have come", STATE,
        "if self._last_updated_timestamp > before:",
        "if self._last_updated_timestamp > before and world.rank() == 0:",
        tests=("elastic/test_state.py::test_a_commit_interrupts_all_ranks",),
    ),
    Fault(
        "callbacks_skipped", "reset callbacks are not called after a change of the ranks", STATE,
        "for callback in self._reset_callbacks:", "for callback in ():",
        tests=("elastic/test_state.py",),
    ),
    Fault(
        "restored_is_far", "a rank that has gone back to a commit counts as far as before", STATE,
        "(self._steps, self._changes), taken, _, beginnings = self._saved",
        "_, taken, _, beginnings = self._saved",
        tests=("elastic/test_state.py::test_a_rank_that_is_a_step_behind_takes_the_others_state",),
    ),
    Fault(
        "not_rewound", "schedulers begin a repeated batch with the state of its end", STATE,
        "                if handler in self._beginnings:\n", "                if False:\n",
        tests=("elastic/test_steps_of_a_batch.py",),
    ),
    Fault(
        "model_held", "an attribute may hold a model, of which a state would keep a copy", STATE,
        "if isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):", "if False:",
        tests=(
            "elastic/test_state.py"
            "::test_an_attribute_that_holds_a_model_or_an_optimizer_is_refused",
        ),
    ),
    Fault(
        "too_few_go_on", "fewer ranks go on than TORCH_RING_MIN_RANKS", REGROUP,
        "if len(group) < self.limits.least:", "if False:",
        tests=("elastic/test_regroup.py::test_too_few_survivors_are_an_error_on_all",),
    ),
    Fault(
        "waits_for_ever", "a leader waits for a busy rank without end", REGROUP,
        "if now > self.deadline:", "if False:",
        tests=("elastic/test_regroup.py::test_a_busy_rank_is_named_when_the_time_is_over",),
    ),
    Fault(
        "minority", "a half without the lowest rank goes on", REGROUP,
        "2 * joined == len(living) and living[0] not in lost", "2 * joined == len(living)",
        tests=("elastic/test_regroup.py::test_only_a_majority_goes_on_where_others_may_live",),
    ),
    Fault(
        "newcomers_first", "newcomers are numbered before the survivors", REGROUP,
        "survivors.append(request.member)", "survivors.insert(0, request.member)",
        tests=("elastic/test_regroup.py::test_newcomers_are_let_in_after_the_survivors",),
    ),
    Fault(
        "generation_stays", "the generation of worlds does not grow", REGROUP,
        "NextWorld(survivors, store, self.generation + 1)",
        "NextWorld(survivors, store, self.generation)",
        tests=("elastic/test_regroup.py",),
    ),
    Fault(
        "all_leave", "ranks leave although newcomers can come first", REGROUP,
        "return [] if are_too_few and somebody_waits else leavers", "return leavers",
        tests=("elastic/test_drain.py::test_ranks_stay_until_a_process_that_waits_has_come",),
    ),
    Fault(
        "fruitless_for_ever", "an error without a death is tried again for ever", RETRY,
        "if fruitless == _MOST_FRUITLESS:", "if False:",
        tests=("elastic/test_regroup.py::test_an_error_without_a_death_is_not_tried_again_for_ever",),
    ),
    Fault(
        "mismatch_retried", "a mismatch is tried again, though the program is wrong", RETRY,
        "except (MismatchError, LeftOutError, StateLostError, ProcessSetLostError):",
        "except (LeftOutError, StateLostError, ProcessSetLostError):",
        tests=("elastic/test_regroup.py::test_an_error_without_a_death_is_not_tried_again_for_ever",),
    ),
    Fault(
        "old_leader", "after a death a host waits for the results of its former leader", ROUNDS,
        "        return shared[0]\n",
        '        self._led = getattr(self, "_led", shared[0])\n        return self._led\n',
        tests=("elastic/test_deaths_in_rounds.py::test_hosts_go_on_without_the_dead",),
    ),
    Fault(
        "half_taken_back", "an agreement that fails is taken back in one fragment", ROUNDS,
        "in zip(self._fragments, counts, strict=True):\n                fragment.on_its_way",
        "in [(self._fragments[0], counts[0])]:\n                fragment.on_its_way",
        tests=(
            "elastic/test_deaths_in_rounds.py"
            "::test_an_agreement_that_fails_is_taken_back_in_all_fragments",
        ),
    ),
    Fault(
        "neighbour_ignored", "a rank does not take the state of its host", STATE,
        "        if neighbour is not None:\n            self._copy_from",
        "        if False:\n            self._copy_from",
        tests=("elastic/test_deaths_in_rounds.py::test_a_rank_takes_the_state_of_its_host",),
    ),
    Fault(
        "left_out_retried", "a rank that the others have left out tries again", RETRY,
        "except (MismatchError, LeftOutError, StateLostError, ProcessSetLostError):",
        "except (MismatchError, StateLostError, ProcessSetLostError):",
        tests=("elastic/test_regroup.py::test_an_error_without_a_death_is_not_tried_again_for_ever",),
    ),
    Fault(
        "exit_code", "a rank that SIGTERM ends says that the job is done", RETRY,
        "sys.exit(ENDED_BY_SIGTERM if is_last or job.is_signalled else 0)", "sys.exit(0)",
        tests=("elastic/test_drain.py",),
    ),
    Fault(
        "sigterm_kept", "the program's SIGTERM handler is replaced", DRAIN,
        "if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:", "if is_main:",
        tests=("elastic/test_drain.py::test_the_programs_handler_stays",),
    ),
    Fault(
        "sigterm_swallowed", "a SIGTERM before the function's end has no effect", DRAIN,
        "if self._is_wanted and kind is not SystemExit:", "if False:",
        tests=("elastic/test_drain.py",),
    ),
    Fault(
        "drain_without_end", "a process that comes to no commit outlives its SIGTERM", DRAIN,
        "while time.monotonic() < gives_up_at:", "while True:",
        tests=("elastic/test_drain.py",),
    ),
    Fault(
        "functions_unequal", "ranks may call elastic functions unequally often", JOB,
        "if calls != calls[:1] * len(calls):", "if False:",
        tests=("elastic/test_two_functions.py::test_ranks_that_call_functions_unequally_often_are_told",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/elastic",))
