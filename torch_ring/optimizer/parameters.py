# SPDX-License-Identifier: Apache-2.0
"""Checks of the parameters that an optimizer reduces the gradients of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_ring._C import device_in_use
from torch_ring.collectives.compare import require_same
from torch_ring.errors import InvalidArgumentError
from torch_ring.optimizer.bucket_wire import ReductionSettings
from torch_ring.optimizer.buckets import TensorSpec
from torch_ring.optimizer.gradient_report import require_usable
from torch_ring.world.process_set import ProcessSet

__all__ = ["device_problem", "has_gradients", "require_same_parameters", "spec_of"]

_ON_NO_DEVICE = ("cpu", "meta")


def device_problem(parameters: Iterable[Tensor]) -> str | None:
    """Return the reason why a process cannot reduce the parameters' gradients; None: it can.

    One process drives one device, beside the CPU: that of its first collective on a device.

    Args:
        parameters: on any devices.
    """
    devices = {p.device for p in parameters if p.device.type not in _ON_NO_DEVICE}
    used = device_in_use()
    if len(devices) > 1:
        places = " and ".join(sorted(map(str, devices)))
        return f"the parameters are on {places}, {_instead(devices)}"
    if used is not None and devices - {used}:
        return (
            f"this process has used {used}, and the parameters are on {devices.pop()}, "
            f"{_instead({used})}"
        )
    return None


def _instead(devices: Iterable[torch.device]) -> str:
    types = {device.type for device in devices}
    choose = "the current device"
    if types == {"cuda"}:
        choose = "torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())"
    return (
        "and one process drives one device. Start a process for each device, keep the model on "
        f"one of them, and choose it before the first collective, by {choose}"
    )


_REDUCIBLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def has_gradients(parameter: Tensor) -> bool:
    """Return whether a parameter has gradients to reduce, now or, if it is frozen, perhaps later.

    A frozen parameter of a dtype that cannot be reduced (a quantised weight) is ignored.
    """
    return parameter.requires_grad or parameter.dtype in _REDUCIBLE or parameter.is_complex()


def spec_of(name: str, parameter: Tensor) -> TensorSpec:
    """Return a gradient's spec for the planner; a complex number counts as two real ones."""
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    numel = parameter.numel()
    if dtype.is_complex:
        dtype, numel = dtype.to_real(), 2 * numel
    if dtype not in _REDUCIBLE:
        raise ValueError(f"the gradient of '{name}' has dtype {dtype}, which cannot be reduced")
    return TensorSpec(numel, dtype, parameter.device)


def require_same_parameters(
    process_set: ProcessSet,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    settings: ReductionSettings,
    groups: Sequence[Sequence[int]],
) -> None:
    """Raise on all ranks, if they wrap different parameters, or wrap them differently.

    Raises:
        ValueError: on this rank, which has only a part of a parameter.
        MismatchError: the ranks differ; names the first parameter that differs between two ranks.
        InvalidArgumentError: one process cannot reduce the gradients.
    """
    require_usable(zip(names, parameters, strict=True))
    problem = device_problem(parameters)
    lines = [problem or settings.describe()]
    group_of = {parameter: index for index, group in enumerate(groups) for parameter in group}
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        dtype = str(parameter.dtype).removeprefix("torch.")
        line = f"'{name}' {dtype} {list(parameter.shape)}"
        # The order of elements in memory is the order in which they are added up.
        line += "" if parameter.is_contiguous() else f" with strides {parameter.stride()}"
        line += f" on {parameter.device.type}"
        line += f" in group {group_of[index]}" if index in group_of else ""
        lines.append(line)
    require_same(lines, "the ranks wrap different optimizers", process_set)
    if problem:  # on all ranks
        raise InvalidArgumentError(problem)
