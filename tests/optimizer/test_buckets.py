# SPDX-License-Identifier: Apache-2.0
"""Buckets: their planner, on random parameters, and groups of gradients, which the user chooses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import run
from torch import nn
from torch.optim import SGD, Optimizer
from training import assert_same_on_all_ranks, joined_batches, make_model, part, train

import torch_ring as hvd
from torch_ring.optimizer.buckets import ALIGNMENT_BYTES, Bucket, TensorSpec, plan_buckets

CPU = torch.device("cpu")
CAPACITY_BYTES, LAST_BYTES, FIRST_BYTES = 1024, 256, 192

specs_and_orders = st.lists(
    st.builds(
        TensorSpec,
        numel=st.integers(0, 400),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        device=st.sampled_from([CPU, torch.device("meta")]),
    ),
    max_size=20,
).flatmap(lambda specs: st.tuples(st.just(specs), st.permutations(range(len(specs)))))


def plan_of(case: tuple[list[TensorSpec], list[int]]) -> tuple[Bucket, ...]:
    specs, order = case
    return plan_buckets(specs, order, CAPACITY_BYTES, LAST_BYTES, first_bytes=FIRST_BYTES)


def size_bytes(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize


@given(specs_and_orders)
def test_every_parameter_has_one_slot(case):
    """Aligned, in a bucket of its kind, within the limits unless it breaks one alone, in order."""
    specs, order = case
    buckets = plan_of(case)
    placed = [slot.parameter for bucket in buckets for slot in bucket.slots]
    assert sorted(placed) == list(range(len(specs)))
    ready_at = {parameter: position for position, parameter in enumerate(order)}
    full_at = []
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            spec = specs[slot.parameter]
            assert (spec.dtype, spec.device) == (bucket.dtype, bucket.device)
            assert spec.numel == slot.numel
            assert slot.offset * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0
            assert slot.offset >= end
            end = slot.offset + slot.numel
        assert end == bucket.numel
        assert size_bytes(bucket) <= CAPACITY_BYTES or len(bucket.slots) == 1
        positions = [ready_at[slot.parameter] for slot in bucket.slots]
        assert positions == sorted(positions)
        full_at.append(positions[-1])
    assert full_at == sorted(full_at)
    for kind in {(bucket.dtype, bucket.device) for bucket in buckets}:
        of_kind = [bucket for bucket in buckets if (bucket.dtype, bucket.device) == kind]
        first, last = of_kind[0], of_kind[-1]
        assert size_bytes(last) <= LAST_BYTES or len(last.slots) == 1
        if len(of_kind) > 1 and first.device != CPU:
            assert size_bytes(first) <= FIRST_BYTES or len(first.slots) == 1


def test_the_first_and_the_last_bucket_of_a_device_are_small():
    """512 KiB each: a device has a first bucket of 1 MiB, the CPU has none."""
    small = plan_buckets([TensorSpec(16, torch.float32, CPU)] * 4, range(4), capacity_bytes=128)
    assert [len(bucket.slots) for bucket in small] == [2, 2]
    for device, sizes in ((CPU, [8, 6, 2]), (torch.device("meta"), [2, 8, 4, 2])):
        specs = [TensorSpec(1 << 17, torch.float32, device)] * 16
        buckets = plan_buckets(specs, range(16), 4 << 20)
        assert [len(bucket.slots) for bucket in buckets] == sizes


@given(specs_and_orders, st.integers(min_value=0))
def test_runs_cover_the_touched_and_nothing_else(case, touched):
    for bucket in plan_of(case):
        covered = [element for begin, end in bucket.runs(touched) for element in range(begin, end)]
        assert len(covered) == len(set(covered))
        inside = set(covered)
        for slot in bucket.slots:
            elements = set(range(slot.offset, slot.offset + slot.numel))
            if touched >> slot.parameter & 1:
                assert elements <= inside
            else:
                assert not elements & inside


def test_touching_all_of_a_bucket_is_one_run():
    specs = [TensorSpec(numel, torch.float32, CPU) for numel in (3, 5, 7)]
    (bucket,) = plan_buckets(specs, [2, 1, 0], CAPACITY_BYTES, LAST_BYTES)
    assert bucket.runs(0b111) == [(0, bucket.numel)]
    assert bucket.runs(0b101) == [(0, 7), (32, 35)]
    assert bucket.runs(0b1000) == []


@given(specs_and_orders, st.data())
def test_a_group_is_one_bucket_of_each_kind(case, data):
    specs, order = case
    numbers = st.sampled_from([None, 0, 1, 2])
    group_of = data.draw(st.lists(numbers, min_size=len(specs), max_size=len(specs)))
    groups = [[p for p, number in enumerate(group_of) if number == g] for g in range(3)]
    buckets = plan_buckets(specs, order, CAPACITY_BYTES, LAST_BYTES, groups)
    placed = [slot.parameter for bucket in buckets for slot in bucket.slots]
    assert sorted(placed) == list(range(len(specs)))
    kinds = []
    for bucket in buckets:
        (number,) = {group_of[slot.parameter] for slot in bucket.slots}
        if number is not None:
            kinds.append((bucket.dtype, bucket.device, number))
    assert len(kinds) == len(set(kinds)), "no group is split"


def buckets_of(optimizer: Optimizer) -> list[list[int]]:
    """Return which parameters share a bucket."""
    plan = optimizer._reducer.layout.plan
    return sorted(sorted(slot.parameter for slot in bucket.slots) for bucket in plan)


def train_in_groups() -> None:
    for groups, expected in (
        (4, [[0, 1], [2, 3], [4], [5]]),
        (100, [[0], [1], [2], [3], [4], [5]]),
        ([[5, 0], [], [2]], [[0, 5], [1, 3, 4], [2]]),
        (0, [[0, 1, 2, 3, 4, 5]]),
    ):
        model = make_model()
        parameters = list(model.parameters())
        if isinstance(groups, list):
            groups = [[parameters[index] for index in group] for group in groups]
        optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1), groups=groups)
        train(model, optimizer, map(part, joined_batches(steps=3)))
        assert buckets_of(optimizer) == expected, "in the order of readiness"
        assert_same_on_all_ranks(*parameters)
    with pytest.warns(DeprecationWarning, match="use groups"):
        optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1), num_groups=4)
    assert len(buckets_of(optimizer)) == 4


def wrap_in_groups() -> None:
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

    optimizer = hvd.DistributedOptimizer(SGD(parameters[:2], lr=0.1), groups=2)
    optimizer.add_param_group({"params": parameters[2:]})
    assert buckets_of(optimizer) == [[0, 1], [2], [3, 4, 5]], "a number splits all"


def place_large_gradients() -> None:
    """Large gradients lie apart, but in groups."""
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in (8, 100, 8, 100, 100)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1), groups=[parameters[3:]])
    assert buckets_of(optimizer) == [[0, 2], [1], [3, 4]]
    sum((hvd.rank() + 1) * p.sum() for p in parameters).backward()
    assert all(torch.equal(p.grad, torch.full_like(p, 1.5)) for p in parameters)


DIRECT, CAPACITY = "TORCH_RING_DIRECT_GRADIENT_BYTES", "TORCH_RING_BUCKET_BYTES"


@pytest.mark.parametrize(
    ("check", "env"),
    [
        (train_in_groups, {DIRECT: "0"}),
        (wrap_in_groups, {DIRECT: "0", CAPACITY: "512"}),
        (place_large_gradients, {DIRECT: "400"}),
    ],
)
def test_groups(check, env):
    run(check, 2, env=env)
