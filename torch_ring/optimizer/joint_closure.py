"""JointClosure: the closure of a step, as LBFGS takes one, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
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
            has_fractions = loss.is_floating_point() or loss.is_complex()
            return reducer.reduce_loss(loss if has_fractions else loss.double())
        if not hasattr(loss, "__float__"):
            raise TypeError(
                "the closure of a step returns the loss, as a tensor or a number, or None; not "
                f"{type(loss).__name__}"
            )
        number = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
        mean = reducer.reduce_loss(number).item()
        is_whole = isinstance(loss, Integral) or not isinstance(loss, Real)
        return mean if is_whole else type(loss)(mean)  # np.float32, say
