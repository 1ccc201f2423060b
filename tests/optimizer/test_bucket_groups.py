"""Groups of gradients, which the user chooses: each group has a bucket of its own."""

import pytest
import torch
from pool import run
from torch import nn
from torch.optim import SGD, Optimizer
from training import assert_same_on_all_ranks, joined_batches, make_model, part, train

import torch_ring as hvd

COPIED = {"TORCH_RING_DIRECT_GRADIENT_BYTES": "0"}  # or large gradients have buckets of their own


def buckets_of(optimizer: Optimizer) -> list[list[int]]:
    """Return which parameters share a bucket."""
    plan = optimizer._reducer.layout.plan
    return sorted(sorted(slot.parameter for slot in bucket.slots) for bucket in plan)


def train_in_groups(
    groups: int | list[list[int]], expected: list[list[int]], name: str = "groups"
) -> None:
    model = make_model()
    parameters = list(model.parameters())
    if isinstance(groups, list):
        groups = [[parameters[index] for index in group] for group in groups]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1), **{name: groups})
    assert buckets_of(optimizer) == expected
    train(model, optimizer, map(part, joined_batches(steps=3)))
    assert buckets_of(optimizer) == expected, "also in the order of readiness"
    assert_same_on_all_ranks(*parameters)


def train_in_all_groups() -> None:
    train_in_groups(4, [[0, 1], [2, 3], [4], [5]])
    with pytest.warns(DeprecationWarning, match="use groups"):
        train_in_groups(4, [[0, 1], [2, 3], [4], [5]], "num_groups")
    train_in_groups(100, [[0], [1], [2], [3], [4], [5]])
    train_in_groups([[5, 0], [], [2]], [[0, 5], [1, 3, 4], [2]])
    train_in_groups(0, [[0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("tcp", 3)])
def test_groups_are_reduced_together(transport, size):
    run(train_in_all_groups, size, transport=transport, env=COPIED)


def check_large_gradients() -> None:
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in (8, 100, 8, 100, 100)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1), groups=[parameters[3:]])
    assert buckets_of(optimizer) == [[0, 2], [1], [3, 4]]
    sum((hvd.rank() + 1) * p.sum() for p in parameters).backward()
    assert all(torch.equal(p.grad, torch.full_like(p, 1.5)) for p in parameters)


def test_large_gradients_lie_apart_but_in_groups():
    run(check_large_gradients, 2, env={"TORCH_RING_DIRECT_GRADIENT_BYTES": "400"})


def check_that_groups_stay_whole() -> None:
    """Neither a limit nor another group splits one; dtypes and added parameters do."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(4)]
    parameters[2].data = parameters[2].data.double()
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1), groups=[parameters[:3]])
    assert buckets_of(optimizer) == [[0, 1], [2], [3]]
    more = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer.add_param_group({"params": more})
    assert buckets_of(optimizer) == [[0, 1], [2], [3], [4, 5]]
    parameters += more
    sum((hvd.rank() + 1) * p.sum() for p in parameters).backward()
    assert all(torch.equal(p.grad, torch.full_like(p, 1.5)) for p in parameters)

    few, many = parameters[:2], parameters[2:]
    optimizer = hvd.DistributedOptimizer(SGD(few, lr=0.1), groups=2)
    optimizer.add_param_group({"params": many})
    assert buckets_of(optimizer) == [[0, 1], [2], [3, 4, 5]], "a number splits all"


def test_groups_are_not_split():
    run(check_that_groups_stay_whole, 2, env=COPIED | {"TORCH_RING_BUCKET_BYTES": "512"})
