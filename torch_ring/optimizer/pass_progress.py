"""next_gradient: how far a backward pass is."""

from __future__ import annotations

from collections.abc import Sequence

from torch_ring.optimizer.buckets import Bucket

__all__ = ["next_gradient"]


def next_gradient(
    optimizer: int, plan: Sequence[Bucket], ready: Sequence[int], names: Sequence[str]
) -> str:
    """Return which gradient a backward pass has not brought yet, and in which bucket it lies.

    Buckets are planned in the order in which gradients become ready. So it is the first one behind
    that which came last: gradients before may belong to parameters that this pass does not use.

    Args:
        optimizer: its index.
        plan: its buckets.
        ready: the parameters whose gradients are there, in order.
        names: by parameter.
    """
    order = [(slot.parameter, bucket) for bucket, each in enumerate(plan) for slot in each.slots]
    last = next((i for i, (each, _) in enumerate(order) if ready and each == ready[-1]), -1)
    for parameter, bucket in order[last + 1 :]:
        if parameter not in ready:
            return (
                f"the gradient of '{names[parameter]}' in bucket {bucket} of optimizer {optimizer}"
            )
    return "the end of the pass"
