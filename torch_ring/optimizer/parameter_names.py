"""checked_names: the names of an optimizer's parameters, by which errors call them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["checked_names", "unnamed"]


def checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the optimizer's parameters in order, with their names.

    Raises:
        ValueError: `named_parameters` are no pairs, or not unique, or lack a parameter.
    """
    if named_parameters is None:
        return {
            parameter: unnamed(number, index)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [None]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters must be pairs of names and parameters: give model.named_parameters()"
        )
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise ValueError(f"named_parameters has names that are not unique: {', '.join(repeated)}")
    name_of = {parameter: name for name, parameter in reversed(named)}  # tied: the first name
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = sum(parameter not in name_of for parameter in parameters)
    if missing:
        raise ValueError(
            f"named_parameters lacks {missing} of the {len(parameters)} parameters of the "
            "optimizer: is it of the same model?"
        )
    return {parameter: name_of[parameter] for parameter in parameters}


def unnamed(group: int, index: int) -> str:
    """Return the name of a parameter without one, as Horovod has it."""
    return f"allreduce.noname.{group}.{index}"
