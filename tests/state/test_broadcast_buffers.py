"""broadcast_buffers(): one broadcast makes ranks with different statistics equal."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from pool import error_of, run
from torch import nn
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring import state


class Normalized(nn.Module):
    """Batch normalisation, and buffers of many dtypes and layouts whose values are the rank's."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.again = self.norm  # buffers with two names
        dtypes = (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float8_e5m2)
        for dtype in dtypes:
            buffer = torch.full((3,), value).to(dtype)
            self.register_buffer(str(dtype).replace("torch.", "of_"), buffer)
        self.register_buffer("unsaved", torch.full((2,), float(value)), persistent=False)
        self.register_buffer("missing", None)
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("strided", torch.full((4, 3), float(value)).t())
        self.register_buffer("expanded", torch.full((4, 1), float(value)).expand(2, 4, 3))


def see_batches(model: nn.Module, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(rank + 1):
        model.norm(torch.randn(4, 5, generator=generator))


def wide(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.to(torch.complex128)


def equal_the_root(root: int) -> int:
    model, expected = Normalized(hvd.rank()), Normalized(root)
    see_batches(model, hvd.rank())
    see_batches(expected, root)
    before = dict(model.named_buffers())
    weight = model.norm.weight.detach().fill_(hvd.rank()).clone()
    with mock.patch.object(state, "broadcast_", wraps=state.broadcast_) as broadcasts:
        hvd.broadcast_buffers(model, root_rank=root)
    for name, buffer in model.named_buffers():
        assert buffer is before[name]
        assert buffer.stride() == expected.get_buffer(name).stride(), name
        assert torch.equal(wide(buffer), wide(expected.get_buffer(name))), name
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert model.norm.num_batches_tracked == root + 1
    assert torch.equal(model.norm.weight, weight), "parameters stay"
    return broadcasts.call_count


@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 0), (2, 1), (3, 2)])
@on_both_transports
def test_all_ranks_get_the_roots_buffers_by_one_broadcast(transport, size, root):
    counts = run(equal_the_root, size, args=(root,), transport=transport)
    assert counts == [1] * size


def without_buffers() -> None:
    hvd.broadcast_buffers(nn.Linear(2, 2))
    hvd.broadcast_buffers(nn.Linear(2, 2), root_rank=1)


def test_a_model_without_buffers():
    run(without_buffers, 2)


def models_that_differ(how: str) -> tuple[str, str]:
    model: nn.Module = nn.BatchNorm1d(4)
    if hvd.rank() == 1:
        if how == "shape":
            model = nn.BatchNorm1d(5)
        elif how == "dtype":
            model.running_var = model.running_var.double()
        elif how == "name":
            model = nn.Sequential(model)
        else:
            model = nn.Linear(2, 2)
    error = error_of(lambda: hvd.broadcast_buffers(model))
    hvd.broadcast_buffers(nn.BatchNorm1d(4))  # the job goes on
    return error


@pytest.mark.parametrize(
    ("how", "ours", "theirs"),
    [
        ("shape", "'running_mean' torch.float32 [4]", "buffer 'running_mean' torch.float32 [5]"),
        ("dtype", "'running_var' torch.float32 [4]", "buffer 'running_var' torch.float64 [4]"),
        ("name", "'running_mean' torch.float32 [4]", "buffer '0.running_mean' torch.float32 [4]"),
        ("absence", "'running_mean' torch.float32 [4]", "nothing"),
    ],
)
def test_models_that_differ_are_refused_on_every_rank(how, ours, theirs):
    expected = f"the ranks have different models: rank 0: buffer {ours}; rank 1: {theirs}"
    assert run(models_that_differ, 3, args=(how,)) == [("MismatchError", expected)] * 3


def in_a_process_set() -> list[float]:
    members = hvd.add_process_set([1, 2])
    model = nn.BatchNorm1d(1)
    model.running_mean.fill_(hvd.rank())
    if members.included():
        hvd.broadcast_buffers(model, 2, members)
        name, text = error_of(lambda: hvd.broadcast_buffers(model, 0, members))
        assert name == "InvalidArgumentError"
        assert "root_rank=0 is not in the process set [1, 2]" in text
    return model.running_mean.tolist()


def test_a_process_set_with_a_global_root():
    assert run(in_a_process_set, 3) == [[0.0], [2.0], [2.0]]
