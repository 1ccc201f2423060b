"""has_gradients, spec_of, coalesced, require_same_parameters: what an optimizer can reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ring.collectives.objects import require_same
from torch_ring.errors import InvalidArgumentError
from torch_ring.optimizer.buckets import TensorSpec
from torch_ring.optimizer.one_device import device_problem
from torch_ring.optimizer.settings import ReductionSettings
from torch_ring.world.process_set import ProcessSet

__all__ = ["coalesced", "has_gradients", "require_same_parameters", "spec_of"]

_REDUCIBLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def has_gradients(parameter: Tensor) -> bool:
    """Return whether a parameter has gradients to reduce, now or, if it is frozen, perhaps later.

    A frozen one of another dtype (a quantised weight) is none of an optimizer's business.
    """
    return parameter.requires_grad or parameter.dtype in _REDUCIBLE or parameter.is_complex()


def spec_of(name: str, parameter: Tensor) -> TensorSpec:
    """Return what the planner needs; a complex number is two real ones."""
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    numel = parameter.numel()
    if dtype.is_complex:
        dtype, numel = dtype.to_real(), 2 * numel
    if dtype not in _REDUCIBLE:
        raise ValueError(f"the gradient of '{name}' has dtype {dtype}, which cannot be reduced")
    return TensorSpec(numel, dtype, parameter.device)


def coalesced(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient with each row once: summed again and again, its rows would multiply."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()


def require_same_parameters(
    process_set: ProcessSet,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    settings: ReductionSettings,
    groups: Sequence[Sequence[int]],
) -> None:
    """Raise on all ranks, if they wrap different parameters, or wrap them differently."""
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
