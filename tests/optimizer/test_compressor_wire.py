"""The message of a round of compressor requests: tensors packed one after the other."""

import torch

from torch_ring.optimizer.stateful_bucket import Layout, pack, unpack


def test_packed_tensors_come_back_unchanged():
    """Any tensors, one after the other, come back unchanged."""
    tensors = [
        torch.arange(5, dtype=torch.int8),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.empty(0, 3),
        torch.randn(3, 4).t(),
        torch.randn(3, dtype=torch.complex128),
        torch.randn(7).to(torch.bfloat16),
    ]
    layouts = [Layout.of(tensor) for tensor in tensors]
    # Two ranks' messages, one after the other, as an allgather gives them.
    received = torch.cat([pack(tensors), pack(tensors[:1])])
    back = list(unpack(received, [*layouts, layouts[0]]))
    for tensor, view in zip([*tensors, tensors[0]], back, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)
    assert pack([]).numel() == 0
