# SPDX-License-Identifier: Apache-2.0
"""Faults of the optimizer's leaves: local steps, divided state, the autotuner."""

from __future__ import annotations

from faults.fault import Fault, Room

LOCAL = "torch_ring/optimizer/local_steps.py"
SHARDED = "torch_ring/optimizer/sharded_state.py"
PARTS = "torch_ring/optimizer/shard_parts.py"
TUNER = "torch_ring/optimizer/autotuner.py"
REDUCER = "torch_ring/optimizer/reducer.py"
DISTRIBUTED = "torch_ring/optimizer/distributed_optimizer.py"

# fmt: off
FAULTS = (
    # --- changes of the parameters
    Fault(
        "broken_for_ever", "a change that failed in a world ends the steps of the last rank alone",
        DISTRIBUTED,
        """        self._broken_by = ""  # also where""", "        # also where",
        tests=("optimizer/test_changed_parameters.py",),
    ),
    # --- local steps
    Fault(
        "agreed_late", "the ranks agree one step too late", LOCAL,
        "if (self._steps - fragment.at) % every == 0:",
        "if (self._steps - fragment.at) % every == 1 % every:",
        tests=("optimizer/test_local_steps.py::test_parameters_are_those_of_the_papers",),
    ),
    Fault(
        "steps_meanwhile_lost", "steps that are taken while a mean is computed are lost", LOCAL,
        "parameter.add_(result - mean.sent[place])", "parameter.copy_(result)",
        tests=("optimizer/test_local_steps.py::test_parameters_are_those_of_the_papers",),
    ),
    Fault(
        "outer_against", "the outer optimizer steps away from the mean", LOCAL,
        "values = [own - p for own, p in zip(agreed, parameters, strict=True)]",
        "values = [p - own for own, p in zip(agreed, parameters, strict=True)]",
        tests=("optimizer/test_local_steps.py::test_parameters_are_those_of_the_papers",),
    ),
    Fault(
        "pending_mean_lost", "a state forgets the steps of a mean that is being computed", LOCAL,
        "[each.rounds, each.unsent]", "[each.rounds, each.steps]",
        tests=("optimizer/test_local_steps.py::test_rounds",),
    ),
    Fault(
        "dropped_mean_lost", "after a change of the ranks the steps of a mean are lost", LOCAL,
        "fragment.steps, fragment.on_its_way = fragment.unsent, None",
        "fragment.on_its_way = None",
        tests=("optimizer/test_local_steps.py::test_rounds",),
    ),
    Fault(
        "failed_exchange_counts", "a step whose exchange has failed counts", LOCAL,
        "            self._steps = steps\n            for fragment, count",
        "            for fragment, count",
        tests=("elastic/test_deaths_in_rounds.py",),
    ),
    Fault(
        "step_counts_twice", "a step that calls its base class's step counts twice", LOCAL,
        """if frame.f_code is wrapper.f_code and frame.f_locals.get("self") is optimizer:""",
        "if False:",
        tests=("optimizer/test_local_steps.py::test_rounds",),
    ),
    Fault(
        "skipped_not_counted", "a step that a scaler skips does not count", LOCAL,
        "            self._rounds.begin_step(self)\n            self._rounds.count_step()\n",
        "            pass\n",
        tests=("optimizer/test_local_steps.py::test_rounds",),
    ),
    Fault(
        "different_agreed", "nobody is told that the agreed parameters differ", LOCAL,
        "self.is_different = bool((digests != digests[0]).any())", "self.is_different = False",
        tests=("optimizer/test_local_steps.py::test_different_agreed_parameters_are_told_once",),
    ),
    Fault(
        "first_weights", "the ranks may begin with different weights", LOCAL,
        "        if problem is None:\n            self._agree_on_present()",
        "        if True:\n            self._agree_on_present()",
        tests=("optimizer/test_local_steps.py::test_errors",),
    ),
    # --- the divided state
    Fault(
        "one_owner", "the first rank steps all parameters", PARTS,
        "owner = min(int(middle / fair), ranks - 1) if fair else 0", "owner = 0",
        tests=("optimizer/test_sharded_state.py::test_parts_are_balanced_and_cover_all",),
    ),
    Fault(
        "cut_anywhere", "a part begins inside a cache line", PARTS,
        "round(at / itemsize / _CUT) * _CUT", "round(at / itemsize)",
        tests=("optimizer/test_sharded_state.py::test_parts_are_balanced_and_cover_all",),
    ),
    Fault(
        "small_cut", "small tensors are cut", PARTS,
        "if may_cut and nbytes * _LEAST_CUT >= fair:", "if may_cut:",
        tests=("optimizer/test_sharded_state.py::test_small_tensors_are_not_cut",),
    ),
    Fault(
        "any_optimizer", "an optimizer that needs all tensors at once is divided", PARTS,
        "inspect.unwrap(k.step) is step), None)", "True), None)",
        tests=("optimizer/test_sharded_state.py::test_wrong_arguments_are_refused_before_anything_is_sent",),
    ),
    Fault(
        "steps_not_compared", "ranks step with different hyper-parameters", SHARDED,
        "if digests * digests != size * squares:", "if False:",
        tests=("optimizer/test_sharded_state.py::test_a_step_that_fails_on_one_rank_fails_on_all",),
    ),
    Fault(
        "beside_ddp", "DDP overwrites the sum of several passes", REDUCER,
        "            refuse_ddp(self._parameters)\n", "",
        tests=("optimizer/test_other_reducers.py::test_a_model_of_ddp",),
    ),
    Fault(
        "moved_home_unseen", "parameters that torch has moved with their storage stop training",
        SHARDED,
        "if not left.has_been_left():", "if True:",
        tests=("model/test_programs.py::test_a_sharded_state",),
    ),
    Fault(
        "order_of_a_set", "ranks have shared tensors in different orders", SHARDED,
        "            for index, key, known, *_ in lines\n"
        "            if (index, key, known) in kept\n",
        "            for index, key, _ in kept\n",
        tests=("optimizer/test_sharded_state.py::test_unusual_surroundings",),
    ),
    Fault(
        "joined_part_stays", "the part of a rank that has joined stays as it is", SHARDED,
        "        if here != size:\n", "        if False:\n",
        tests=("optimizer/test_sharded_state.py::test_a_step_that_fails_on_one_rank_fails_on_all",),
    ),
    Fault(
        "half_step", "a step that failed on one rank is no error on the others", SHARDED,
        "        if failed:\n            raise RingError(",
        "        if False:\n            raise RingError(",
        tests=("optimizer/test_sharded_state.py::test_a_step_that_fails_on_one_rank_fails_on_all",),
    ),
    Fault(
        "write_of_one", "a write of one rank alone is taken", SHARDED,
        "if any(total * total != len(ranks) * square for ranks, total, square in sums):",
        "if False:",
        tests=("optimizer/test_sharded_state.py::test_a_write_of_one_rank_is_an_error_on_all",),
    ),
    Fault(
        "own_copies_stay", "a rank keeps its own copies of the pages that it has written", SHARDED,
        "            segment.drop(pages)\n", "            pass\n",
        tests=("optimizer/test_sharded_state.py::test_what_a_program_does_counts_as_without",),
    ),
    Fault(
        "torn_unseen", "survivors do not notice that a step is half done", SHARDED,
        "if any(written != 2 * self._steps_here for written in self._written.tolist()):",
        "if False:",
        tests=("elastic/test_kills.py::test_ranks_die",),
    ),
    Fault(
        "lost_parts", "ranks go on without the parts of the state that are lost", SHARDED,
        "if any(told.has_lost for told in every.values()):", "if False:",
        tests=(
            "elastic/test_kills.py::test_parts_outside_shared_memory_are_lost_with_their_world",
        ),
    ),
    Fault(
        "checkpoint_of_part", "a checkpoint has one rank's part of the state", SHARDED,
        "        self._collect(optimizer, to_cpu=True)\n", "        pass\n",
        tests=("optimizer/test_sharded_state.py::test_checkpoints_are_those_of_an_unsharded_optimizer",),
    ),
    Fault(
        "parts_as_whole", "collected parts are placed in memory of a part's size", SHARDED,
        "                self._collect(optimizer)  # now whole, the same on all ranks\n", "",
        tests=("optimizer/test_sharded_state.py::test_unusual_surroundings",),
    ),
    Fault(
        "put_is_lost", "a tensor that replaces one in shared memory does not count", SHARDED,
        "            program.copy_(value)\n", "",
        tests=("optimizer/test_sharded_state.py::test_what_a_program_does_counts_as_without",),
    ),
    Fault(
        "put_over_another", "a tensor is copied where a value still lies", SHARDED,
        "value.clone() if is_shared else value", "value",
        tests=("optimizer/test_sharded_state.py::test_what_a_program_does_counts_as_without",),
    ),
    Fault(
        "other_keys", "other keys of a state in shared memory are not placed", SHARDED,
        "is_rebuilt = self.is_shared and bool(placed)", "is_rebuilt = False",
        tests=("optimizer/test_sharded_state.py::test_what_a_program_does_counts_as_without",),
    ),
    Fault(
        "moved_parameter", "a part stays in the memory that its parameter has left", SHARDED,
        "                tensor.data = cut(value, part)\n", "                pass\n",
        tests=("optimizer/test_sharded_state.py::test_what_a_program_does_counts_as_without",),
    ),
    # --- reducers that disappear
    Fault(
        "pin_holds_nothing", "a reducer may go while the ranks agree and reduce", REDUCER,
        "        self._pinned = dict(self.items())\n        return list(self._pinned.values())",
        "        return self.values()",
        tests=("optimizer/test_reducers.py::test_none_goes_while_it_is_held",),
    ),
    Fault(
        "pinned_for_ever", "a dropped optimizer stays after a pass", REDUCER,
        "        self._pinned = {}\n", "        pass\n",
        tests=("optimizer/test_shared_parameters.py",),
    ),
    # --- the autotuner
    Fault(
        "fastest_rank_decides", "the buckets are those of the fastest rank", TUNER,
        "default_s, better_s = self._reduced(medians_s, Max)", "default_s, better_s = medians_s",
        tests=("optimizer/test_autotuner.py::test_limits_that_do_not_win_go",),
    ),
    Fault(
        "noise_wins", "a gain that is noise replaces the default", TUNER,
        "wins = better_s < (1 - _LEAST_GAIN) * default_s", "wins = True",
        tests=("optimizer/test_autotuner.py::test_limits_that_do_not_win_go",),
    ),
    Fault(
        "stopped_tries_on", "a tuner that is stopped keeps the buckets of its trial", TUNER,
        "self._finish(self._default, {})\n\n    # --- measurements",
        "pass\n\n    # --- measurements",
        tests=("optimizer/test_autotuner.py::test_a_tuner_that_is_stopped_goes_back",),
    ),
    Fault(
        "hooks_stay", "the tuner's hooks stay for ever", TUNER,
        "            hook.remove()\n", "            pass\n",
        tests=("optimizer/test_autotuner.py",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/optimizer",))
