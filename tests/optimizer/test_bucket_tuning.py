"""The step model that chooses bucket sizes."""

import pytest
import torch

from torch_ring.optimizer.autotuner import BucketLimits, Transfer, exposed_s, predict
from torch_ring.optimizer.buckets import TensorSpec, plan_buckets

MIB = 1 << 20
CPU = torch.device("cpu")
SPECS = [TensorSpec(MIB // 4, torch.float32, CPU)] * 32  # 1 MiB each
ORDER = range(31, -1, -1)  # the last one is ready first
READY_S = [(31 - index) / 31 for index in range(32)]  # one after the other
DEFAULT = BucketLimits(25 * MIB, MIB)


def plan_of(limits):
    return plan_buckets(SPECS, ORDER, limits.capacity_bytes, limits.last_bytes)


def test_two_measurements_give_latency_and_bandwidth():
    true = Transfer(2e-3, 1e9)
    found = Transfer.through((4096, true.time_s(4096)), (8 * MIB, true.time_s(8 * MIB)))
    assert found.latency_s == pytest.approx(true.latency_s)
    assert found.bytes_per_s == pytest.approx(true.bytes_per_s)
    # Measurements that make no sense give no negative time.
    found = Transfer.through((4096, 2e-3), (8 * MIB, 1e-3))
    assert found.latency_s >= 0
    assert found.bytes_per_s > 0
    assert found.time_s(100) < 1


def test_what_is_left_when_backward_ends():
    """25 MiB are ready after 24/31 s and are sent in 0.25 s, 6 MiB then in 0.06, 1 MiB in 0.01."""
    transfer = Transfer(0.0, 100 * MIB)
    ends = 24 / 31 + 0.25
    assert [bucket.numel * 4 // MIB for bucket in plan_of(DEFAULT)] == [25, 6, 1]
    left = exposed_s(plan_of(DEFAULT), READY_S, transfer)
    assert left == pytest.approx(max(ends, 30 / 31) + 0.06 + 0.01 - 1)
    assert exposed_s(plan_of(DEFAULT), READY_S, Transfer(0.0, 1e15)) == pytest.approx(0, abs=1e-6)


def test_a_slow_network_wants_small_buckets_and_a_late_one_large_ones():
    def best(transfer):
        predicted = predict(DEFAULT, plan_of, READY_S, transfer)
        return min(predicted.items(), key=lambda each: each[1])

    slow, left_s = best(Transfer(1e-5, 40 * MIB))  # 32 MiB in 0.8 s: sending should begin early
    assert slow.capacity_bytes < 8 * MIB
    assert left_s < exposed_s(plan_of(DEFAULT), READY_S, Transfer(1e-5, 40 * MIB)) / 2
    late, left_s = best(
        Transfer(1.0, 1e12)
    )  # each bucket costs a second: two of 16 MiB are the fewest
    assert len(plan_of(late)) == 2
    assert left_s == pytest.approx(15 / 31 + 2 - 1, abs=1e-3)


def test_where_all_are_equal_the_default_stays():
    found = predict(DEFAULT, plan_of, [0.0] * 32, Transfer(0.0, 1e18))
    assert next(iter(found)) == DEFAULT
    assert len({f"{left_s:.9f}" for left_s in found.values()}) == 1
