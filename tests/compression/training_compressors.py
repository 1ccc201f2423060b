# SPDX-License-Identifier: Apache-2.0
"""Compressors for tests: exact ones, and those with a state."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_ring as hvd

DOCUMENT = Path(__file__).parents[2] / "docs" / "compression.md"


@functools.cache
def documented_compressor() -> Any:
    """Return the class that docs/compression.md shows."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "class TopK" in block]
    body = code[code.index("class TopK") :].splitlines()
    assert len([line for line in body if line.strip()]) <= 20, "the document promises 20 lines"
    names: dict[str, Any] = {}
    exec(code, names)
    return names["TopK"]


class Exact(hvd.StatefulCompressor):
    """Loses nothing, and counts its calls."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Iterator[Any]:
        state["dtype"] = gradient.dtype
        state["calls"] = state.get("calls", 0) + 1
        return (yield hvd.Reduce(gradient))


class Ragged(hvd.StatefulCompressor):
    """Loses nothing: gathers the nonzero elements in two rounds, a scalar in one."""

    def reduce(self, gradient: Tensor, state: dict[str, Any]) -> Iterator[Any]:
        positions = gradient.flatten().nonzero()[:, 0].to(torch.int32)
        everyones = [positions for (positions,) in (yield hvd.Gather(positions))]
        values = yield hvd.Gather(gradient.flatten()[positions], torch.tensor(hvd.rank()))
        if gradient.dim() > 0:
            ones = yield hvd.Reduce(torch.ones(2))
            assert ones.tolist() == [1, 1]
        total = torch.zeros(gradient.numel(), dtype=gradient.dtype)
        for rank, (theirs, (value, sender)) in enumerate(zip(everyones, values, strict=True)):
            assert sender == rank
            total[theirs] += value
        return (total / len(values)).view_as(gradient)


COMPRESSORS: dict[str, Callable[[], hvd.StatefulCompressor]] = {
    "int8": lambda: hvd.Compression.int8(elements_per_scale=16),
    "powersgd": lambda: hvd.Compression.powersgd(rank=2),
    "topk": lambda: documented_compressor()(0.1),
}
