"""digests_of: numbers that follow from the bits of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["digests_of"]

_ROW_BYTES = 4096
_PIECE_BYTES = {"cpu": 1 << 20}  # at a time: what fits a cache
_DEVICE_PIECE_BYTES = 64 << 20  # on other devices, where a call costs more than the memory
_ODD = -7046029254386353131  # the fraction of the golden ratio, as the bits of an int64


def digests_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number for each tensor that follows from its bits, int64 on the CPU.

    Equal numbers mean equal bits, but for one pair of tensors in about 2**60. NaNs are compared by
    their bits, too. A tensor whose bits cannot be read (on the meta device, a wrapper around other
    tensors, neither dense nor sparse COO) counts as the same everywhere.

    Cost: one pass over the tensors, one wait for each device, and a copy of each tensor that is not
    contiguous, one at a time.
    """
    readable: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if _is_readable(tensor):
            readable.setdefault(tensor.device, []).append(index)
    digests = torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
    with torch.no_grad():
        for device, indices in readable.items():
            weights = _mixed(torch.arange(1, _ROW_BYTES // 8 + 1, device=device) * _ODD) | 1
            found = [_digest(tensors[index].detach(), weights) for index in indices]
            digests[indices] = torch.stack(found).cpu()
    return digests


def _is_readable(tensor: Tensor) -> bool:
    return (
        tensor.layout in (torch.strided, torch.sparse_coo)
        and tensor.numel() > 0
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not is_traceable_wrapper_subclass(tensor)
    )


def _digest(tensor: Tensor, weights: Tensor) -> Tensor:
    """Return a sum of the tensor's words of 8 bytes, modulo 2**64.

    Each word is mixed, so that its highest bits count as the others do, and multiplied by the odd
    number of its place. So are the sums of rows of 4 KiB.
    """
    if tensor.layout == torch.sparse_coo:
        places, values = tensor._indices(), tensor._values()
        if not values.numel():
            return places.sum()
        return _digest(places, weights) * 3 + _digest(values, weights)
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    octets = plain.view(-1).view(torch.uint8)
    if octets.data_ptr() % 8 or octets.storage_offset() % 8:
        octets = octets.clone()  # or it could not be read as words of 8 bytes
    whole = octets.numel() - octets.numel() % _ROW_BYTES
    at_once = _PIECE_BYTES.get(octets.device.type, _DEVICE_PIECE_BYTES) // _ROW_BYTES
    pieces = torch.split(octets[:whole].view(torch.int64).view(-1, len(weights)), at_once)
    rows = [(_mixed(piece) * weights).sum(1) for piece in pieces]
    if whole < octets.numel():
        last = pad(octets[whole:], (0, -octets.numel() % 8)).view(torch.int64)
        rows.append((_mixed(last) * weights[: len(last)]).sum(0, keepdim=True))
    sums = torch.cat(rows)
    return (_mixed(sums) * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def _mixed(words: Tensor) -> Tensor:
    return words ^ (words >> 32)
