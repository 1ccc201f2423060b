"""Sparse gradients on their way: what their ranks have is gathered, not added up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_ring import _C
from torch_ring.errors import MismatchError

__all__ = ["SparseSum"]


class SparseSum:
    """The uncoalesced sum over ranks of a sparse gradient, by two allgathers.

    Each rank's part is coalesced before it is sent: a sum that is summed again and again would grow
    by the factor of the size each time. Ranks that have joined give nothing.

    Args:
        engine: of the ranks that take part.
        name: what identifies it on all of them.
        parameter: has the shape, dtype and device of the sum.
        gradient: this rank's; may be dense, or None.
        divisor: divides the sum.
    """

    def __init__(
        self,
        engine: _C.Engine,
        name: str,
        parameter: Tensor,
        gradient: Tensor | None,
        divisor: int,
    ) -> None:
        self._name = name
        self._like = parameter
        self._divisor = divisor
        if gradient is None:
            header = torch.zeros(2, dtype=torch.int64, device=parameter.device)
            values = parameter.new_empty(0)
        else:
            gradient = gradient.detach()
            gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
            shape = torch.tensor(gradient.indices().shape, device=parameter.device)
            header = torch.cat([shape, gradient.indices().flatten()])
            values = gradient.values().flatten()
        if values.is_complex():
            values = torch.view_as_real(values).flatten()
        self._indices = engine.allgather(header, f"{name}.indices", joinable=True)
        self._values = engine.allgather(values, f"{name}.values", joinable=True)

    def wait(self) -> Tensor:
        """Return the sum; raise MismatchError if ranks disagree on what of it is sparse."""
        indices, values = self._indices.wait(), self._values.wait()
        parts = [part for part in _split(indices) if len(part)]
        sparse_dims = {len(part) for part in parts}
        if len(sparse_dims) != 1:
            raise MismatchError(
                f"'{self._name}': the sparse gradients of the ranks have different numbers of "
                f"sparse dimensions: {sorted(sparse_dims)}"
            )
        if self._like.is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        inner = self._like.shape[sparse_dims.pop() :]
        joined = torch.cat(parts, dim=1)
        values = values.view(joined.shape[1], *inner) / self._divisor
        return torch.sparse_coo_tensor(
            joined, values, self._like.shape, check_invariants=False, is_coalesced=False
        )


def _split(indices: Tensor) -> Iterator[Tensor]:
    """Yield the indices [sparse_dim, rows] of each rank: its shape goes before each."""
    begin = 0
    while begin < len(indices):
        sparse_dim, rows = indices[begin : begin + 2].tolist()
        begin += 2
        yield indices[begin : begin + sparse_dim * rows].view(sparse_dim, rows)
        begin += sparse_dim * rows
