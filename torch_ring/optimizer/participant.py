"""Participant: one optimizer's side of backward synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from torch_ring._C import DenseFinalizer, GradientHooks, PlannedBucket
from torch_ring.optimizer.gradient_report import GradientReport
from torch_ring.optimizer.weight_comparison import WeightComparison

__all__ = ["FastPath", "Participant", "Pending"]

Pending = tuple[bytes, bytes, bool, bool, bool, bool]
"""What `GradientHooks.pending` returns."""


class FastPath(NamedTuple):
    """The end of a pass in which all gradients of the only optimizer are due on all ranks."""

    finalizer: DenseFinalizer
    report: GradientReport  # which all ranks send then


class Participant(Protocol):
    """One optimizer's side of backward synchronisation (`torch_ring.optimizer.reducer.Reducer`)."""

    nothing_pending: bool
    """Whether the ranks have nothing to agree on before the step."""

    fast_path: FastPath | None
    """The fast path, once the buckets are in their final order and where there is one."""

    comparison: WeightComparison
    """The comparison of the ranks' weights."""

    steps: int
    """Steps that the optimizer has taken since then."""

    hooks: GradientHooks
    """Those of the optimizer's parameters."""

    @property
    def runs_ahead(self) -> bool:
        """Whether its buckets can be reduced without an agreement."""

    def bitmap(self, parameters: int) -> bytes:
        """Return a bitmap as the hooks take it."""

    def is_all(self, parameters: int) -> bool:
        """Return whether a bitmap has all parameters."""

    def planned_buckets(self, touched: int) -> list[PlannedBucket]:
        """Return how to reduce these parameters without an agreement. Only if `runs_ahead`."""

    def follow_parameters(self) -> None:
        """Give the parameters that have moved to another device memory there."""

    def stop_tuning(self) -> None:
        """Leave the buckets as they were planned: ranks may have counted passes differently."""

    def report(self, everything: bool) -> GradientReport | None:
        """Return which gradients are due here, or with `everything` which exist; None: none."""

    def refuse_gradients_by_hand(self) -> None:
        """End the job if the program has set a gradient itself that is not reduced."""

    def prepare(self, touched: int, sparse: int, number: int) -> None:
        """Take the gradients of parameters that are about to be reduced.

        Another participant may have some of them too: all are prepared before the first one starts.

        Args:
            touched: those that have a gradient on some rank, as a bitmap.
            sparse: those of them whose gradients are sparse wherever there is one.
            number: the agreement's, a part of the names of the operations.
        """

    def ask_joined(self, touched: int, number: int, before: float, after: float) -> str:
        """Ask ranks that have just joined for the averaged gradients to which others were added.

        They have a part of those, and are missing in the sum that the ranks left will make.

        Args:
            touched: the parameters that are about to be reduced, as a bitmap.
            number: the agreement's.
            before: the scale of reduced gradients that held when others were added.
            after: that of the ranks left.

        Returns:
            Why the gradients of this pass cannot be right; "" if they will be.
        """

    def start(self, number: int) -> None:
        """Start to reduce the parameters that are prepared."""

    def start_bucket(self, bucket: int) -> None:
        """Start to reduce a bucket during the pass."""

    def new_memory(self, bucket: int) -> Tensor:
        """Return other memory for a bucket."""

    def finish(self, order: Sequence[int]) -> None:
        """Wait until they are reduced, then use rank 0's order of readiness, if there is one."""
