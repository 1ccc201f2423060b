"""digests_of, start_digests: numbers that follow from the bits of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["digests_of", "start_digests"]

_ROW_WORDS = 512  # of 8 bytes
_ROW_BYTES = 8 * _ROW_WORDS
_PIECE_BYTES = 1 << 20  # added up at a time on the CPU: what fits a cache
_DEVICE_PIECE_BYTES = 1 << 30  # on other devices
_ODD = -7046029254386353131  # the fraction of the golden ratio, as the bits of an int64


def digests_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number for each tensor that follows from its bits, int64 on the CPU.

    Tensors that differ by chance have different numbers, but for one pair in about 2**60. NaNs are
    compared by their bits, too. A tensor whose bits cannot be read (on the meta device, a wrapper
    around other tensors, neither dense nor sparse COO) counts as the same everywhere.

    Cost: one pass over the tensors, one wait for each device, and a copy of each tensor that is not
    contiguous, one at a time.
    """
    return start_digests(tensors)()


def start_digests(tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Start what `digests_of` does; return a function that waits for it.

    The host waits for no device before that: what the tensors hold now counts, whatever the current
    streams write into them later.
    """
    readable: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if _is_readable(tensor):
            readable.setdefault(tensor.device, []).append(index)
    started: list[tuple[list[int], Tensor, torch.Event | None]] = []
    with torch.no_grad():
        for device, indices in readable.items():
            order, found = _digests_on(device, indices, tensors)
            host = found.to("cpu", non_blocking=True)
            copied = None if device.type == "cpu" else torch.Event(device=device)
            if copied is not None:
                copied.record()
            started.append((order, host, copied))

    def finish() -> Tensor:
        digests = torch.zeros(len(tensors), dtype=torch.int64, device="cpu")
        for order, host, copied in started:
            if copied is not None:
                copied.synchronize()
            digests[order] = host
        return digests

    return finish


def _digests_on(
    device: torch.device, indices: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[list[int], Tensor]:
    """Return the digests of tensors of a device there, and the indices in their order."""
    small: dict[torch.dtype, list[int]] = {}
    large: list[int] = []
    for index in indices:
        tensor = tensors[index]
        (small.setdefault(tensor.dtype, []) if _is_small(tensor) else large).append(index)
    parts = [_parts_of(tensors[index].detach()) for index in large]
    rows = max((part.nbytes // _ROW_BYTES for group in parts for part in group), default=0)
    factors = torch.arange(1, rows + 2 * _ROW_WORDS + 1, device=device) * _ODD | 1
    found = [_digest(first, factors) for first, *_ in parts]
    for position, (_, *more) in enumerate(parts):
        for part in more:
            found[position] = 3 * found[position] + _digest(part, factors)
    order = [*large, *(index for group in small.values() for index in group)]
    joint = [_joint_digests([tensors[i].detach() for i in g], factors) for g in small.values()]
    return order, torch.cat([*(digest.view(1) for digest in found), *joint])


def _is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is read together with others: each operator costs microseconds."""
    return (
        tensor.layout == torch.strided
        and tensor.nbytes < _ROW_BYTES
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _joint_digests(tensors: Sequence[Tensor], factors: Tensor) -> Tensor:
    """Return the `_digest` of each of several tensors of one dtype, which have no whole row."""
    size = tensors[0].element_size()
    flat = [tensor.reshape(-1) for tensor in tensors]
    if size == 1:  # not all such dtypes can be joined
        flat = [tensor.view(torch.uint8) for tensor in flat]
    octets = [tensor.numel() * size for tensor in flat]
    if any(count % 8 for count in octets):  # each begins with a word of its own
        zeros = flat[0].new_zeros(8)
        gaps = [zeros[: -count % 8 // size] for count in octets]
        flat = [part for pair in zip(flat, gaps, strict=True) for part in pair]
    words = torch.cat(flat).view(torch.uint8).view(torch.int64)
    counts = torch.tensor([(count + 7) // 8 for count in octets], device="cpu")
    ends = counts.cumsum(0)
    places = torch.arange(len(words), device="cpu") - torch.repeat_interleave(ends - counts, counts)
    mixed = words * _ODD
    sums = ((mixed ^ (mixed >> 32)) * factors[places.to(words.device)]).cumsum(0)
    last = sums[ends.to(words.device) - 1]
    return torch.diff(last, prepend=last.new_zeros(1))


def _is_readable(tensor: Tensor) -> bool:
    return (
        tensor.layout in (torch.strided, torch.sparse_coo)
        and tensor.numel() > 0
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not is_traceable_wrapper_subclass(tensor)
    )


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors with all bits of `tensor`."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor.int_repr() if tensor.is_quantized else tensor]


def _digest(tensor: Tensor, factors: Tensor) -> Tensor:
    """Return a number made of the sums of rows of 4 KiB, and of columns of words of 8 bytes.

    Two words that change places change a sum of rows, of columns or both. Each sum is mixed, so
    that its highest bits count as the others do, and multiplied by an odd number of its place.
    """
    octets = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if octets.data_ptr() % 8 or octets.storage_offset() % 8:
        octets = octets.clone()  # or it could not be read as words of 8 bytes
    whole = octets.numel() - octets.numel() % _ROW_BYTES
    # The words after the last whole row; none if the rows are all there is.
    sums = [pad(octets[whole:], (0, -octets.numel() % 8)).view(torch.int64)]
    if whole:
        at_once = _PIECE_BYTES if octets.device.type == "cpu" else _DEVICE_PIECE_BYTES
        rows = octets[:whole].view(torch.int64).view(-1, _ROW_WORDS)
        pieces = torch.split(rows, at_once // _ROW_BYTES)
        sums += [piece.sum(1) for piece in pieces]
        sums.append(torch.stack([piece.sum(0) for piece in pieces]).sum(0))
    mixed = torch.cat(sums) * _ODD
    return ((mixed ^ (mixed >> 32)) * factors[: len(mixed)]).sum()
