# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm: the ranks get the results of one process on the joined batch."""

from __future__ import annotations

import copy

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_ring as hvd


def batches(shape: tuple[int, ...], counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the batch of each rank; its mean is too large for a sum of squares."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, *shape, generator=generator) * 2 + 300).to(dtype) for n in counts]


@on_ranks(1, 3)
def test_sync_batch_norm_equals_one_process() -> None:
    rank, size = hvd.rank(), hvd.size()
    cases = [
        (nn.BatchNorm1d(4), (4,), [3 + r for r in range(size)], torch.float32),
        (nn.BatchNorm1d(4, momentum=None), (4, 7), [2] * size, torch.float64),
        (nn.BatchNorm2d(3, eps=0.1, affine=False), (3, 5, 2), [2 + r for r in range(size)], None),
        (nn.BatchNorm3d(2, track_running_stats=False), (2, 2, 2, 2), [1] * size, torch.float32),
        (nn.BatchNorm2d(3), (3, 4, 4), [5 * (r == 0) for r in range(size)], torch.float32),
    ]
    for plain, shape, counts, given in cases:
        dtype = given or torch.float32
        plain.to(dtype)
        with torch.no_grad():
            for index, parameter in enumerate(plain.parameters()):
                parameter.copy_(torch.arange(len(parameter)) + 0.5 + index)
        sync = hvd.SyncBatchNorm(
            plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats
        ).to(dtype)
        sync.load_state_dict(plain.state_dict())
        tolerance = {"rtol": 1e-4, "atol": 1e-4}
        for _ in range(2):  # the second with running statistics of the first
            parts = [part.requires_grad_() for part in batches(shape, counts, dtype)]
            plain.zero_grad()
            sync.zero_grad()
            joined = plain(torch.cat(parts))
            weights = torch.arange(joined.numel(), dtype=dtype).view(joined.shape).cos()
            (joined * weights).sum().backward()
            begin = sum(counts[:rank])
            mine = parts[rank].detach().requires_grad_()
            output = sync(mine)
            (output * weights[begin : begin + counts[rank]]).sum().backward()
            torch.testing.assert_close(output, joined[begin : begin + counts[rank]], **tolerance)
            torch.testing.assert_close(mine.grad, parts[rank].grad, **tolerance)
            for ours, theirs in zip(sync.parameters(), plain.parameters(), strict=True):
                total = hvd.allreduce(ours.grad, op=hvd.Sum)
                torch.testing.assert_close(total, theirs.grad, rtol=1e-4, atol=1e-2)
            for ours, theirs in zip(sync.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, **tolerance)
        plain.eval()
        sync.eval()
        torch.testing.assert_close(sync(parts[0]), plain(parts[0]), **tolerance)


def second_gradients(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a gradient penalty of `layer(x)`, with the layer used twice."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((layer(layer(x)) ** 3).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None
    return x.grad


@on_ranks(3, 4)
def test_in_a_set_and_differentiated_twice() -> None:
    """Compare second derivatives, a layer without a bias, and a layer that is used twice."""
    pair = hvd.add_process_set([0, 2])
    if not pair.included():
        with pytest.raises(ValueError, match="is not in"):
            hvd.SyncBatchNorm(3, process_set=pair)(torch.ones(2, 3))
        return
    plain = nn.BatchNorm1d(3).double()
    plain.bias = None
    with torch.no_grad():
        plain.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
    sync = hvd.SyncBatchNorm(3, process_set=pair).double()
    sync.bias = None
    sync.load_state_dict(plain.state_dict())
    parts = batches((3,), [4, 0] if hvd.size() == 4 else [4, 5], torch.float64)
    want = second_gradients(plain, torch.cat(parts)).split([len(part) for part in parts])
    got = second_gradients(sync, parts[pair.rank()])
    torch.testing.assert_close(got, want[pair.rank()])
    weight_gradient = hvd.allreduce(sync.weight.grad, op=hvd.Sum, process_set=pair)
    torch.testing.assert_close(weight_gradient, plain.weight.grad)
    for ours, theirs in zip(sync.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_dtypes_and_errors() -> None:
    layer = hvd.SyncBatchNorm(4)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(6, 4).to(dtype).requires_grad_()
        output = layer(x)
        output.sum().backward()
        assert output.dtype == x.grad.dtype == dtype
    with pytest.raises(ValueError, match="more than one value per channel"):
        layer(torch.randn(1 if hvd.rank() == 0 else 0, 4))  # on both
    with pytest.raises(ValueError, match="4 channels"):
        layer(torch.randn(2, 5))
    with pytest.raises(ValueError, match="floating point"):
        layer(torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 dimensions"):
        layer(torch.randn(4))
    assert layer(torch.randn(1, 4)).shape == (1, 4)  # two values on two ranks
    before = layer.running_mean.clone()
    layer.track_running_stats = False  # from now on
    layer(torch.randn(6, 4))
    assert torch.equal(layer.running_mean, before)


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_checkpoints_track_a_batch_once(use_reentrant: bool) -> None:
    """The running statistics count the batch once, as without checkpoints."""
    torch.manual_seed(hvd.rank())
    x = torch.randn(4, 3, requires_grad=True)
    layers = [hvd.SyncBatchNorm(3) for _ in range(2)]
    gradients = []
    for layer, how in zip(layers, ("plain", "checkpoint"), strict=True):
        for _ in range(2):
            x.grad = None
            output = (
                layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=use_reentrant)
            )
            output.pow(3).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    for got, want in zip(layers[1].buffers(), layers[0].buffers(), strict=True):
        assert torch.equal(got, want)


@on_ranks(2)
def test_evaluation_is_no_collective() -> None:
    layer = hvd.SyncBatchNorm(2, track_running_stats=False).eval()
    if hvd.rank() == 1:  # the others have no batch
        x = torch.randn(5, 2)
        torch.testing.assert_close(layer(x), nn.BatchNorm1d(2, track_running_stats=False)(x))
    assert hvd.allgather(torch.tensor([float(hvd.rank())])).tolist() == [0.0, 1.0]


@on_ranks(2)
def test_convert_sync_batchnorm() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(2, affine=False))
    )
    model[1].eval()
    parameters = list(model.parameters())
    buffers = list(model.buffers())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model[1], hvd.SyncBatchNorm)
    assert isinstance(model[2][0], hvd.SyncBatchNorm)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert not model[1].training
    assert model[2].training
    layer = model[1]
    assert hvd.convert_sync_batchnorm(layer) is layer
    assert isinstance(hvd.convert_sync_batchnorm(nn.BatchNorm1d(3)), hvd.SyncBatchNorm)
    shared = nn.BatchNorm1d(3)
    twice = hvd.convert_sync_batchnorm(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert isinstance(twice["a"], hvd.SyncBatchNorm)
    assert twice["a"] is twice["b"][0]
    with pytest.raises(ValueError, match="lazy"):
        hvd.convert_sync_batchnorm(nn.LazyBatchNorm2d())
    model(torch.randn(2, 1, 5, 5)).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)


@on_ranks(3)
def test_joined_rank_counts_as_an_empty_batch() -> None:
    """Rank 1 has fewer batches: from then on it counts as an empty batch."""
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    model = hvd.convert_sync_batchnorm(copy.deepcopy(alone))
    mine = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), op=hvd.Sum)
    of_alone = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(2 if hvd.rank() == 1 else 5):
        ranks = [rank for rank in range(hvd.size()) if rank != 1 or step < 2]
        parts = batches((3,), [2 + rank for rank in ranks], torch.float64)
        for optimizer, network, batch in (
            (of_alone, alone, torch.cat(parts)),
            (mine, model, parts[ranks.index(hvd.rank())]),
        ):
            optimizer.zero_grad()
            network(batch).pow(3).sum().backward()
            optimizer.step()
    hvd.join()
    for ours, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
