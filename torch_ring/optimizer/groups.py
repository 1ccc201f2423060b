"""check_groups and resolve_groups: gradients that an optimizer's arguments keep together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from torch_ring.optimizer.buckets import split_evenly

__all__ = ["Groups", "check_groups", "resolve_groups"]

Groups = int | Sequence[Sequence[Tensor]] | None


def check_groups(groups: Groups, num_groups: int, parameters: Sequence[Tensor]) -> Groups:
    """Return the checked value of `groups`, or of its deprecated alias `num_groups`.

    Raises:
        ValueError: a number is negative; an element of a group is no tensor, is in `groups` twice,
            or is none of `parameters`.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must be a non-negative integer, not {groups}")
        return groups
    if not isinstance(groups, list | tuple) or not all(isinstance(g, list | tuple) for g in groups):
        raise ValueError("groups must be a non-negative integer or a list of lists of tensors")
    known, seen = set(map(id, parameters)), set()
    for tensor in (tensor for group in groups for tensor in group):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"groups must consist of tensors, not of {type(tensor).__name__}")
        if id(tensor) in seen:
            raise ValueError("a parameter can be in groups only once")
        if id(tensor) not in known:
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} in groups is no parameter of the optimizer"
            )
        seen.add(id(tensor))
    return groups


def resolve_groups(groups: Groups, parameters: Sequence[Tensor]) -> list[Sequence[int]]:
    """Return the groups as parameter indices; a number means so many consecutive groups.

    Tensors in groups that are none of `parameters` have no gradients.
    """
    if isinstance(groups, int):
        return list(split_evenly(len(parameters), groups)) if groups else []
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    indices = [[index_of.get(id(tensor)) for tensor in group] for group in groups or ()]
    known = [[index for index in group if index is not None] for group in indices]
    return [group for group in known if group]
