# SPDX-License-Identifier: Apache-2.0
"""Faults of compression: casts, 8-bit codes, PowerSGD, error feedback."""

from __future__ import annotations

from faults.fault import Fault, Room

CASTS = "torch_ring/compression/casts.py"
INT8 = "torch_ring/compression/int8.py"
POWERSGD = "torch_ring/compression/powersgd.py"
STATEFUL = "torch_ring/compression/stateful.py"

# fmt: off
FAULTS = (
    Fault(
        "integers_cast", "integers are rounded by a cast", CASTS,
        "tensor.to(cls.wire_dtype) if tensor.is_floating_point() else tensor",
        "tensor.to(cls.wire_dtype)",
        tests=("compression/test_compressors.py::test_casts_leave_integers_as_they_are",),
    ),
    Fault(
        "stays_cast", "a result stays in the dtype of the wire", CASTS,
        "return tensor.to(ctx)", "return tensor",
        tests=("collectives/test_every_collective.py::test_allreduce_with_compression",),
    ),
    Fault(
        "error_forgotten", "the part of a gradient that was not sent is lost", STATEFUL,
        """state["error"] = gradient - sent""", """state["error"] = gradient * 0.0""",
        tests=("compression/test_compressors.py::test_sent_and_error_add_up_to_the_gradients",),
    ),
    Fault(
        "other_model", "the state of another model is added to a gradient", STATEFUL,
        "if owed.shape != gradient.shape:", "if owed.numel() != gradient.numel():",
        tests=("compression/test_compressors.py::test_invalid_settings_are_refused",),
    ),
    Fault(
        "two_served", "a compressor serves two parameters of one name", STATEFUL,
        "if self._served.get(name, parameter) is not parameter:", "if False:",
        tests=("compression/test_compressed_training.py::test_wrong_use_of_compressors",),
    ),
    Fault(
        "copy_serves", "a copy of a compressor serves the parameters of the first one", STATEFUL,
        """if key != "_served"}""", "}",
        tests=("compression/test_compressors.py::test_copies_serve_other_parameters",),
    ),
    Fault(
        "state_shared", "state_dict() has the states themselves", STATEFUL,
        "return {name: dict(state) for name, state in self.states.items()}", "return self.states",
        tests=("compression/test_compressed_training.py",),
    ),
    Fault(
        "last_codes_only", "the codes of the last rank are the sum", INT8,
        "dequantize(codes, scales, gradient.shape).add_(total)",
        "dequantize(codes, scales, gradient.shape)",
        tests=("compression/test_compressors.py", "compression/test_compressed_training.py"),
    ),
    Fault(
        "sum_for_mean", "the sum of the ranks' codes is not divided", INT8,
        "return total.div_(len(everyones)), dequantize", "return total, dequantize",
        tests=("compression/test_compressors.py", "compression/test_compressed_training.py"),
    ),
    Fault(
        "one_scale", "all elements have the scale of the largest", INT8,
        "rows.abs().amax(1, keepdim=True)", "rows.abs().amax().expand(len(rows), 1)",
        tests=("compression/test_compressors.py::test_quantize",),
    ),
    Fault(
        "overflow_hidden", "an infinite element becomes a finite one", INT8,
        "rows.abs().amax(1, keepdim=True) / _LARGEST_CODE",
        "rows.nan_to_num().abs().amax(1, keepdim=True) / _LARGEST_CODE",
        tests=("compression/test_compressors.py::test_quantize_does_not_hide_overflow",),
    ),
    Fault(
        "truncated", "elements are rounded toward zero", INT8,
        ".round_().to(torch.int8)", ".to(torch.int8)",
        tests=("compression/test_compressors.py::test_quantize",),
    ),
    Fault(
        "cold_start", "PowerSGD begins anew in each step", POWERSGD,
        'if "right" in state:', "if False:",
        tests=("compression/test_compressors.py::test_powersgd_warm_start_improves_from_step_to_step",),
    ),
    Fault(
        "own_projection", "the error of PowerSGD is that of the mean", POWERSGD,
        "sent = left @ own_right.T", "sent = mean",
        tests=("compression/test_compressors.py::test_powersgd_is_exact_for_a_mean_of_its_rank",),
    ),
    Fault(
        "small_compressed", "a tensor is sent as two matrices that are larger", POWERSGD,
        "return self.rank * (rows + columns) < rows * columns", "return True",
        tests=("compression/test_compressors.py::test_powersgd_sends_small_tensors_whole",),
    ),
    Fault(
        "own_first_matrix", "the ranks begin PowerSGD with different matrices", POWERSGD,
        """torch.Generator("cpu").manual_seed(self.seed)""",
        """torch.Generator("cpu").manual_seed(id(matrix))""",
        tests=("compression/test_compressors.py::test_powersgd_is_exact_for_a_mean_of_its_rank",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/compression",))
