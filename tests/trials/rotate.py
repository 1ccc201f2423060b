# SPDX-License-Identifier: Apache-2.0
"""Calls the made-up collective: each rank gets the tensor of the rank before it."""

import torch

import torch_ring as hvd

hvd.init()
before = (hvd.rank() - 1) % hvd.size()
for count in (3, 100_000):  # inline, and not
    tensor = torch.full((2, count), 0.5 * hvd.rank())
    assert hvd.rotate(tensor).equal(torch.full_like(tensor, 0.5 * before))
text = ""
try:
    hvd.rotate(torch.ones(hvd.rank() + 1), name="unlike")
except hvd.MismatchError as error:
    text = str(error)
assert "rotate 'unlike' float32 [1]" in text, text
print("rotated", flush=True)
