"""digests_of and describe_difference: whether all ranks train the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["describe_difference", "digests_of", "summary_of"]

_ROW_BYTES = 4096


def digests_of(parameters: Sequence[Tensor]) -> Tensor:
    """Return a number for each parameter that follows from its bits, int64 on the CPU.

    NaNs are compared by their bits, too. A parameter whose bits cannot be read (on the meta device,
    a wrapper around other tensors, not strided) counts as the same everywhere.

    Cost: one pass over the weights, one wait for each device, and a copy of each parameter that is
    not contiguous, one at a time.
    """
    readable: dict[torch.device, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if _is_readable(parameter):
            readable.setdefault(parameter.device, []).append(index)
    digests = torch.zeros(len(parameters), dtype=torch.int64, device="cpu")
    for indices in readable.values():
        digests[indices] = torch.stack([_digest(parameters[index]) for index in indices]).cpu()
    return digests


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


def _is_readable(parameter: Tensor) -> bool:
    return (
        parameter.layout == torch.strided
        and parameter.numel() > 0
        and parameter.device.type != "meta"
        and not is_traceable_wrapper_subclass(parameter)
    )


def _digest(parameter: Tensor) -> Tensor:
    """Return the sum of the parameter's rows of 4 KiB, each times another odd number, modulo 2**64.

    A sum sees an even number of equal values, where an exclusive or sees nothing.
    """
    plain = parameter.detach().resolve_conj().resolve_neg().contiguous()
    octets = plain.view(-1).view(torch.uint8)
    if octets.storage_offset() % 8 or octets.data_ptr() % 8:
        octets = octets.clone()  # or it could not be read as words of 8 bytes
    whole = octets.numel() - octets.numel() % _ROW_BYTES
    rows = octets[:whole].view(torch.int64).view(-1, _ROW_BYTES // 8).sum(1)
    parts = torch.cat([rows, octets[whole:].to(torch.int64)])
    factors = torch.arange(1, 2 * len(parts), 2, device=parts.device)
    return (parts * factors).sum()
