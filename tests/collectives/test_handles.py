"""Asynchronous operations and their handles."""

import pytest
import torch
from pool import run
from worlds import on_all_worlds

import torch_ring as hvd


def submit_in_another_order() -> None:
    size = hvd.size()
    tensors = [torch.full((i * 7 % 50,), float(i)) for i in range(500)]
    order = range(500) if hvd.rank() == 0 else reversed(range(500))
    handles = {i: hvd.allreduce_async(tensors[i], name=f"t{i}", op=hvd.Sum) for i in order}
    for i, tensor in enumerate(tensors):
        assert torch.equal(hvd.synchronize(handles[i]), tensor * size)
        assert hvd.synchronize(handles[i]) is None
    handle = hvd.allreduce_async_(tensors[9], name="t9")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle) is tensors[9]
    with pytest.raises(ValueError, match="is not a handle"):
        hvd.poll(17)  # type: ignore[arg-type]
    hvd.barrier()


@on_all_worlds
def test_handles_in_any_order(transport, size):
    run(submit_in_another_order, size, transport=transport)
