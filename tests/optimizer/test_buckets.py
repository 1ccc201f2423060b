"""The bucket planner, on random parameters."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_ring.optimizer.buckets import (
    ALIGNMENT_BYTES,
    Bucket,
    TensorSpec,
    plan_buckets,
    split_evenly,
)

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
    specs, _ = case
    buckets = plan_of(case)
    placed = sorted(slot.parameter for bucket in buckets for slot in bucket.slots)
    assert placed == list(range(len(specs)))
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


@given(specs_and_orders)
def test_limits_are_kept_unless_one_gradient_breaks_them(case):
    buckets = plan_of(case)
    for bucket in buckets:
        assert size_bytes(bucket) <= CAPACITY_BYTES or len(bucket.slots) == 1
    for kind in {(bucket.dtype, bucket.device) for bucket in buckets}:
        of_kind = [bucket for bucket in buckets if (bucket.dtype, bucket.device) == kind]
        first, last = of_kind[0], of_kind[-1]
        assert size_bytes(last) <= LAST_BYTES or len(last.slots) == 1
        if len(of_kind) > 1 and first.device != CPU:
            assert size_bytes(first) <= FIRST_BYTES or len(first.slots) == 1


@given(specs_and_orders)
def test_buckets_follow_the_order_of_readiness(case):
    ready_at = {parameter: position for position, parameter in enumerate(case[1])}
    within = [[ready_at[slot.parameter] for slot in bucket.slots] for bucket in plan_of(case)]
    assert all(positions == sorted(positions) for positions in within)
    full_at = [positions[-1] for positions in within]
    assert full_at == sorted(full_at)


@given(specs_and_orders)
def test_no_two_neighbours_would_fit_into_one_bucket(case):
    """There are as few buckets as the order allows; the first and the last are small on purpose."""
    by_kind: dict[object, list[Bucket]] = {}
    for bucket in plan_of(case):
        by_kind.setdefault((bucket.dtype, bucket.device), []).append(bucket)
    specs, _ = case
    for buckets in by_kind.values():
        for bucket, following in pairwise(buckets[:-1]):
            first = specs[following.slots[0].parameter]
            begin = -(-size_bytes(bucket) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            is_small = bucket is buckets[0] and bucket.device != CPU
            assert begin + first.aligned_bytes > (FIRST_BYTES if is_small else CAPACITY_BYTES)


def test_the_first_and_the_last_bucket_of_a_device_are_small():
    """512 KiB each: a device has a first bucket of 1 MiB, the CPU has none."""
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


@given(specs_and_orders)
def test_groups_and_parameters_alone_do_not_change_the_plan_of_others(case):
    specs, order = case
    chosen, rest = order[: len(order) // 2], order[len(order) // 2 :]
    expected = plan_buckets(specs, rest, CAPACITY_BYTES, LAST_BYTES)
    for options in ({"groups": [chosen]}, {"alone": chosen}):
        buckets = plan_buckets(specs, order, CAPACITY_BYTES, LAST_BYTES, **options)
        others = [bucket for bucket in buckets if bucket.slots[0].parameter in rest]
        assert tuple(others) == expected
    apart = [bucket.slots for bucket in buckets if bucket not in others]
    assert [slot.parameter for (slot,) in apart] == list(chosen)


@given(st.integers(0, 40), st.integers(1, 50))
def test_parameters_are_split_evenly(count, parts):
    groups = split_evenly(count, parts)
    assert [i for group in groups for i in group] == list(range(count))
    assert len(groups) == min(count, parts)
    lengths = [len(group) for group in groups]
    assert sorted(lengths, reverse=True) == lengths
    assert not lengths or lengths[0] - lengths[-1] <= 1


def test_a_small_capacity_holds_for_the_last_bucket_too():
    specs = [TensorSpec(16, torch.float32, CPU)] * 4
    buckets = plan_buckets(specs, [3, 2, 1, 0], capacity_bytes=128)
    assert [len(bucket.slots) for bucket in buckets] == [2, 2]
