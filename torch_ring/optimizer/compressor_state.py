"""state_if_finite: the choice between two states of a compressor, made where the result lies."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ring.compression.stateful import State

__all__ = ["state_if_finite"]


def state_if_finite(result: Tensor, after: State, before: State) -> State:
    """Return the state after a result if that is finite, else the state before it.

    The host waits for no device if the states differ in tensors alone, of the same shapes: these
    are chosen on the device. So they do once a parameter has a state; before, and if something else
    has changed, the host needs to know.

    Args:
        result: of any shape, not empty.
        after: new tensors in place of those of `before`.
        before: empty at first.
    """
    is_finite = result.abs().amax().isfinite()
    if not is_finite.is_cpu:
        chosen = _chosen_there(is_finite, after, before)
        if chosen is not None:
            return chosen
    return after if is_finite else before


def _chosen_there(is_finite: Tensor, after: State, before: State) -> State | None:
    """Return the chosen state, None if that takes the host."""
    if after.keys() != before.keys():
        return None
    chosen: State = {}
    for key, new in after.items():
        old = before[key]
        if new is old:
            chosen[key] = old
        elif _is_like(new, old) and new.device == is_finite.device:
            chosen[key] = torch.where(is_finite, new, old)
        else:
            return None
    return chosen


def _is_like(new: object, old: object) -> bool:
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return False
    return (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)
