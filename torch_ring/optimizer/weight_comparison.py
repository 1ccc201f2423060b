"""summary_of and describe_difference: whether all ranks train the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["describe_difference", "summary_of"]


def summary_of(digests: Tensor) -> bytes:
    """Return 8 bytes that follow from all digests."""
    return hashlib.blake2b(digests.numpy().tobytes(), digest_size=8).digest()


def describe_difference(
    names: Sequence[str],
    ranks: Sequence[int],
    digests: Tensor,
    process_set: ProcessSet = global_process_set,
) -> str | None:
    """Return which parameters differ between ranks, and what to do; None if they are the same.

    Args:
        names: of the parameters.
        ranks: of the rows, ascending.
        digests: of each rank, int64 [rank, parameter].
        process_set: of the optimizer.
    """
    differs = digests != digests[0]
    columns = differs.any(0).nonzero().flatten().tolist()
    if not columns:
        return None
    others = [
        rank for rank, other in zip(ranks, differs[:, columns[0]].tolist(), strict=True) if other
    ]
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    which = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:3]))}{more}"
    in_set = "" if process_set.process_set_id == 0 else ", process_set=..."
    return (
        f"the ranks train different weights: '{names[columns[0]]}' on {which} is not that on rank "
        f"{ranks[0]} ({len(columns)} of {len(names)} parameters of this optimizer differ). "
        "Gradients are averaged, weights are not, so they stay different: call "
        f"broadcast_parameters(model.state_dict(), root_rank={ranks[0]}{in_set}) before the first "
        "step" + ("" if in_set else ", and after join(), from the rank that join() returns")
    )
