"""JointClosure: the closure of a step, as LBFGS takes one, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ring.optimizer.reducer import Reducer

__all__ = ["JointClosure"]


class JointClosure:
    """A closure whose gradients and loss are reduced over all ranks."""

    def __init__(self, closure: Callable[[], Any], reducer: Callable[[], Reducer]) -> None:
        self._closure = closure
        self._reducer = reducer

    @classmethod
    def of(cls, closure: Callable[[], Any], reducer: Callable[[], Reducer]) -> Callable[[], Any]:
        """Return `closure` as a JointClosure, or itself if it is one.

        Args:
            closure: computes gradients, and returns a loss or None.
            reducer: returns the optimizer's, which `closure` may change: by add_param_group().
        """
        return closure if isinstance(closure, cls) else cls(closure, reducer)

    def __call__(self) -> Any:
        """Compute the gradients, reduce them, and return the loss of all ranks together."""
        self._reducer().nothing_pending = False
        loss = self._closure()
        reducer = self._reducer()
        reducer.reduce_pending()
        if loss is None:
            return None
        if isinstance(loss, Tensor):
            return reducer.reduce_loss(loss)
        number = torch.tensor(loss, dtype=torch.float64, device="cpu")
        return type(loss)(reducer.reduce_loss(number))
