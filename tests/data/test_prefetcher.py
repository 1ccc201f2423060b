# SPDX-License-Identifier: Apache-2.0
"""DevicePrefetcher: on the CPU, and on a stand-in for a device."""

from __future__ import annotations

from typing import Any

import device_double
import pytest
import torch
from device_double import DEVICE
from on_ranks import on_ranks

from torch_ring.data import DevicePrefetcher


def test_a_cpu_gets_the_batches_themselves():
    batches = [{"x": torch.ones(2), "name": "a"}, (torch.ones(3), None)]
    prefetcher = DevicePrefetcher(batches, "cpu")
    assert len(prefetcher) == 2
    assert all(got is batch for got, batch in zip(prefetcher, batches, strict=True))
    with pytest.raises(TypeError, match="len"):
        len(DevicePrefetcher(iter(batches), "cpu"))


class Gated(DevicePrefetcher):
    """Copies the second batch and later ones only after the gate is opened."""

    def to_device(self, batch: Any) -> Any:
        if batch[0] == 1:
            self.gate = torch.ops.ringdouble.close_gate()
        return super().to_device(batch)


@pytest.mark.slow
@device_double.needed
@on_ranks(1, initialized=False)
def test_a_copy_is_under_way_during_a_step() -> None:
    """A step waits for the copy of its own batch, not for the next copy, already in flight."""
    device_double.load()
    prefetcher = Gated([torch.full((3,), float(index)) for index in range(3)], DEVICE)
    batches = iter(prefetcher)
    first = next(batches)
    assert (first + 1).tolist() == [1.0] * 3  # would never end
    torch.ops.ringdouble.open_gate(prefetcher.gate)
    assert [batch.tolist() for batch in batches] == [[1.0] * 3, [2.0] * 3]
