# SPDX-License-Identifier: Apache-2.0
"""Faults of collectives: derivatives, objects, comparisons, operators."""

from __future__ import annotations

from faults.fault import Fault, Room

ALLREDUCE = "torch_ring/collectives/allreduce.py"
ALLGATHER = "torch_ring/collectives/allgather.py"
ALLTOALL = "torch_ring/collectives/alltoall.py"
BROADCAST = "torch_ring/collectives/broadcast.py"
SCATTER = "torch_ring/collectives/reducescatter.py"
COMPARE = "torch_ring/collectives/compare.py"
OBJECTS = "torch_ring/collectives/objects.py"
PICKLE = "torch_ring/collectives/plain_pickle.py"
OPERATORS = "torch_ring/collectives/operators.py"
OP = "torch_ring/collectives/reduce_op.py"
HANDLE = "torch_ring/collectives/handle.py"
SERIES = "torch_ring/collectives/promised_series.py"

# fmt: off
FAULTS = (
    # --- derivatives
    Fault(
        "others_rows", "the gradient of an allgather is that of the first rank's rows", ALLGATHER,
        "rank = process_set.rank()", "rank = 0",
        tests=("collectives/test_every_collective.py::test_gradients",),
    ),
    Fault(
        "gradient_not_sent_back", "the gradient of an alltoall stays on the receiver", ALLTOALL,
        "(back,), _ = _alltoall(gradients[0], received[0], None, process_set)",
        "back = gradients[0]",
        tests=("collectives/test_every_collective.py::test_gradients",),
    ),
    Fault(
        "unsent_rows", "rows that were not sent have no gradient", ALLTOALL,
        "if unsent else back", "if False else back",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "gradient_for_all", "all ranks get the gradient of a broadcast", BROADCAST,
        "is_root=world.rank() == root_rank", "is_root=True",
        tests=("collectives/test_every_collective.py::test_gradients",),
    ),
    Fault(
        "gradient_unscaled", "the gradient of a reducescatter lacks the number of ranks", SCATTER,
        "return prescale * postscale * (process_set.size() if op == Sum else 1)",
        "return prescale * postscale",
        tests=("collectives/test_every_collective.py",),
    ),
    Fault(
        "factors_not_in_gradient", "the gradient of an allreduce lacks its factors", ALLREDUCE,
        "[allreduce(gradients[0], None, None, Compression.none, *arguments, process_set)]",
        "[allreduce(gradients[0], op=arguments[0], process_set=process_set)]",
        tests=("collectives/test_every_collective.py::test_factors",),
    ),
    Fault(
        "old_value_used", "autograd does not notice that a tensor has changed", HANDLE,
        "    torch.autograd.graph.increment_version(tensor)\n", "    pass\n",
        tests=("collectives/test_every_collective.py::test_autograd_notices_operations_in_place",),
    ),
    Fault(
        "own_vote", "any_rank() has the answer of this rank", ALLREDUCE,
        'return bool(allreduce(own, name="any_rank", op=Max, process_set=process_set))',
        'allreduce(own, name="any_rank", op=Max, process_set=process_set)\n    return bool(own)',
        tests=("optimizer/test_early_stopping.py",),
    ),
    Fault(
        "group_error_late", "a group raises the last failure, and not the first", HANDLE,
        "first_error = first_error or error", "first_error = error",
        tests=("collectives/test_grouped.py",),
    ),
    Fault(
        "compiled_share", "a compiled reducescatter gives the last ranks one row more", OPERATORS,
        "(tensor.shape[0] + len(ranks) - 1 - ranks.index(current.rank())) // len(ranks)",
        "(tensor.shape[0] + ranks.index(current.rank())) // len(ranks)",
        tests=("collectives/test_compiled_collectives.py",),
    ),
    Fault(
        "compiled_old_world", "a compiled function uses a set of the last world", OPERATORS,
        "for record in world.process_sets.records if world.token == of_world else ():",
        "for record in world.process_sets.records:",
        tests=("collectives/test_compiled_collectives.py::test_follow_the_world",),
    ),
    # --- operators
    Fault(
        "flag_is_sum", "op=True is taken for Sum", OP,
        "isinstance(op, Integral) and not isinstance(op, bool) and op in allowed",
        "isinstance(op, Integral) and op in allowed",
        tests=("collectives/test_wrong_calls.py",),
    ),
    Fault(
        "average_word", "average='name' counts as True", OP,
        "if meant is not None or isinstance(average, str):", "if meant is not None:",
        tests=("collectives/test_wrong_calls.py::test_wrong_arguments",),
    ),
    # --- comparisons
    Fault(
        "swapped_words", "two words that change places have the same digest", COMPARE,
        "    return ((mixed ^ (mixed >> 32)) * factors[: len(mixed)]).sum()",
        "    return (mixed ^ (mixed >> 32)).sum()",
        tests=("optimizer/test_different_weights.py",),
    ),
    Fault(
        "rows_only", "of large tensors only the sums of rows are compared", COMPARE,
        "        sums.append(torch.stack([piece.sum(0) for piece in pieces]).sum(0))\n", "",
        tests=("collectives/test_consistency.py", "optimizer/test_different_weights.py"),
    ),
    Fault(
        "wrong_blamed", "the rank with the usual value is named as the one that differs", COMPARE,
        "others = [rank for rank, found in first.items() if found != usual]",
        "others = [rank for rank, found in first.items() if found == usual]",
        tests=("collectives/test_consistency.py::test_the_first_difference_is_named_on_all_ranks",),
    ),
    Fault(
        "dtype_not_described", "tensors of different dtypes are the same if their bits are",
        COMPARE,
        "return f\"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}\"",
        'return f"{list(value.shape)}"',
        tests=("collectives/test_consistency.py",),
    ),
    Fault(
        "never_checked", "TORCH_RING_CHECK_EVERY checks no step", COMPARE,
        "if not every or step % every:", "if True:",
        tests=("collectives/test_consistency.py::test_every_third_step_is_checked",),
    ),
    # --- objects
    Fault(
        "pickle_failure_untold", "the others wait for an object that cannot be pickled", OBJECTS,
        "        return _NOTHING, failure\n", "        raise\n",
        tests=("collectives/test_objects.py::test_objects_without_a_pickle",),
    ),
    Fault(
        "damaged_object_read", "a damaged object is read", OBJECTS,
        "    if is_checked:  # before pickle reads it\n", "    if False:\n",
        tests=("elastic/test_damaged_state.py",),
    ),
    Fault(
        "code_of_strangers", "a pickle from another host may run code", OBJECTS,
        "read = pickle.loads if is_near else loads_plain", "read = pickle.loads",
        tests=("world/test_strangers.py",),
    ),
    Fault(
        "any_name", "plain data may name any function", PICKLE,
        "        if found is None:\n            raise pickle.UnpicklingError(ascii",
        "        if found is None:\n            return super().find_class(module, name)\n"
        "            raise pickle.UnpicklingError(ascii",
        tests=("collectives/test_plain_pickle.py::test_what_is_not_plain_is_named",),
    ),
    Fault(
        "beyond_storage", "a tensor may lie beyond its storage", PICKLE,
        "is_within = 0 in size or (last + 1) * dtype.itemsize <= len(data)", "is_within = True",
        tests=("collectives/test_plain_pickle.py::test_tensors_that_are_wrong",),
    ),
    Fault(
        "class_set", "plain data may set the class of a namespace", PICKLE,
        'all(type(name) is str and not name.startswith("__") for name in names)',
        "all(type(name) is str for name in names)",
        tests=("collectives/test_plain_pickle.py",),
    ),
    Fault(
        "any_call", "plain data may call what they may only name", PICKLE,
        "type(arguments) is tuple and any(f is function for f in _CALLABLE.values())",
        "type(arguments) is tuple",
        tests=("collectives/test_plain_pickle.py",),
    ),
    # --- promised series
    Fault(
        "left_not_compared", "ranks that have left out different layers go on", SERIES,
        "if len(set(left)) > 1:", "if False:",
        tests=("device/test_promised_series.py",),
    ),
    Fault(
        "unlike_promised", "ranks keep promises that differ", SERIES,
        "if place < 0 or len(ranks) < self._size or any(rank != own for rank in ranks):",
        "if place < 0 or len(ranks) < self._size:",
        tests=("device/test_promised_series.py",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/collectives",))
