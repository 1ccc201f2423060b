# SPDX-License-Identifier: Apache-2.0
"""Behaviours of horovod.torch in training: the optimizer, join(), state and SyncBatchNorm."""

from __future__ import annotations

import copy
import pickle
import warnings

import torch
from behaviours_of_collectives import raises
from torch import Tensor, nn

import torch_ring as hvd


def equal_on_all_ranks(*tensors: Tensor) -> bool:
    return all(
        all(torch.equal(tensor, other) for other in hvd.allgather_object(tensor))
        for tensor in tensors
    )


def behaviour_09_join() -> None:
    rank, size = hvd.rank(), hvd.size()
    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    for step in range(rank + 1):  # uneven data
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert model.bias.grad is not None
        torch.testing.assert_close(model.bias.grad, torch.tensor([(size - step) / size]))
        optimizer.step()
        assert hvd.allreduce(torch.ones(1), op=hvd.Product, name=f"loss.{step}").item() == 1
    assert hvd.join() == size - 1
    hvd.broadcast_parameters(model.state_dict(), size - 1)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size  # numbered alike again
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert equal_on_all_ranks(*model.parameters())


def trained_weights(scheme: str) -> Tensor:
    """Return the weights after three steps, taken in one of the ways of Horovod's scripts."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    for step in range(3):
        data = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        if scheme == "plain":
            optimizer.step()
            continue
        optimizer.synchronize()
        if scheme == "skip":
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
    return model.weight.detach().clone()


def behaviour_10_synchronize() -> None:
    weights = [trained_weights(scheme) for scheme in ("plain", "skip", "twice")]
    assert all(torch.equal(weights[0], other) for other in weights)
    assert equal_on_all_ranks(weights[0])


def behaviour_11_backward_passes() -> None:
    size = hvd.size()
    x = torch.zeros(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([x], lr=1.0), [("x", x)], backward_passes_per_step=2
    )
    mean = (size - 1) / 2
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            (x * hvd.rank()).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.tensor([2 * mean]))  # summed, then averaged
        optimizer.step()
    optimizer.zero_grad()
    (x * hvd.rank()).sum().backward()
    optimizer.step()  # with fewer passes: reduces the gradients so far
    torch.testing.assert_close(x.detach(), torch.tensor([-5 * mean]))
    optimizer.zero_grad()
    for _ in range(2):
        (x * hvd.rank()).sum().backward()
    with raises(AssertionError):
        (x * hvd.rank()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.backward_passes_per_step == 2
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    (x * hvd.rank()).sum().backward()
    assert x.grad.item() == mean
    optimizer.step()


def behaviour_12_predivide_and_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    reference: list[Tensor] = []
    parameters = list(model.parameters())
    for options in (
        {},
        {"gradient_predivide_factor": 4.0},
        {"groups": 2},
        {"groups": [parameters[:2], parameters[2:3]]},
        {"num_groups": 2},
    ):
        copied = copy.deepcopy(model)
        if isinstance(options.get("groups"), list):
            own = list(copied.parameters())
            options = {"groups": [own[:2], own[2:3]]}
        sgd = torch.optim.SGD(copied.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = hvd.DistributedOptimizer(sgd, copied.named_parameters(), **options)
        copied(torch.full((1, 2), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
        reference = reference or [p.detach().clone() for p in copied.parameters()]
        for ours, theirs in zip(copied.parameters(), reference, strict=True):
            torch.testing.assert_close(ours.detach(), theirs)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"groups": -1},
        {"groups": [[torch.ones(1)]]},
        {"groups": [parameters[:1], parameters[:1]]},
    ):
        with raises(ValueError):
            hvd.DistributedOptimizer(sgd, model.named_parameters(), **wrong)


def behaviour_13_wrapping() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.defaults["lr"] == 0.5
    assert pickle.loads(pickle.dumps(optimizer)).defaults["lr"] == 0.5
    weight, bias = model.parameters()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for names in ([("a", weight), ("a", bias)], [("a", weight)], ["weight", "bias"]):
        with raises(ValueError):
            hvd.DistributedOptimizer(sgd, names)
    late = nn.Linear(1, 1)
    optimizer.add_param_group({"params": late.parameters()})
    late(model(torch.full((1, 2), float(hvd.rank())))).sum().backward()
    assert late.bias.grad is not None
    assert equal_on_all_ranks(late.weight.grad, model.weight.grad)
    optimizer.zero_grad(set_to_none=True)
    assert late.bias.grad is None


def behaviour_14_zero_grad() -> None:
    x = torch.zeros(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)])
    x.sum().backward()
    optimizer.zero_grad()  # nothing is outstanding: Horovod's assertion has no cause
    x.sum().backward()
    optimizer.step()
    assert x.item() == -1


def behaviour_15_optimizer_state() -> None:
    rank = hvd.rank()
    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    before = model.weight.detach().clone()
    plain = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), weight_decay=0.5)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    assert plain.param_groups[0]["lr"] == 0.1
    adam = torch.optim.AdamW(model.parameters(), lr=1, betas=(0.5, 0.6 + 0.1 * rank))
    if rank == 0:
        model(torch.ones(1, 2)).sum().backward()
        adam.step()
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(adam, root_rank=0)
    assert adam.param_groups[0]["betas"] == (0.5, 0.6)
    assert type(adam.param_groups[0]["lr"]) is int
    assert adam.state[model.weight]["step"] == 1
    assert equal_on_all_ranks(adam.state[model.weight]["exp_avg"], model.weight.detach())
    assert not torch.equal(before, model.weight)


def behaviour_16_adasum() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if hvd.size() == 3:
        with raises(ValueError, "power of two"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum)
        with raises(ValueError, "power of two"):
            hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Adasum)
        return
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    ab, aa, bb = (a @ b).item(), (a @ a).item(), (b @ b).item()
    want = (1 - ab / (2 * aa)) * a + (1 - ab / (2 * bb)) * b
    torch.testing.assert_close(hvd.allreduce([a, b][hvd.rank()], op=hvd.Adasum), want)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Adasum)
    start = model.weight.detach().clone()
    model([a, b][hvd.rank()]).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), start - 0.1 * want)
    with raises(AssertionError), optimizer.skip_synchronize():
        pass


def behaviour_17_sparse() -> None:
    size, rank = hvd.size(), hvd.rank()
    gradients = []
    for as_dense in (False, True):
        embedding = nn.Embedding(size + 2, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0),
            embedding.named_parameters(),
            sparse_as_dense=as_dense,
        )
        embedding(torch.tensor([0, rank + 1])).sum().backward()
        optimizer.synchronize()
        gradient = embedding.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        gradients.append(gradient.to_dense())
        with optimizer.skip_synchronize():
            optimizer.step()
    want = torch.tensor([1.0] + [1 / size] * size + [0.0])
    for dense in gradients:
        torch.testing.assert_close(dense[:, 0], want)


def behaviour_20_sync_batch_norm() -> None:
    size, rank = hvd.size(), hvd.rank()
    data = torch.randn(2 * size, 3, 4, generator=torch.Generator().manual_seed(1))
    joined = nn.BatchNorm1d(3)(data)[2 * rank : 2 * rank + 2]
    sync = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
    torch.testing.assert_close(sync(data[2 * rank : 2 * rank + 2]), joined)
