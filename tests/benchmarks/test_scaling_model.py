"""The model of scaling: its arithmetic, its monotonicity, and what Horovod published."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import choice
import clusters
import pytest
import scaling_model
import torch
import world_limits
from hypothesis import given
from hypothesis import strategies as st
from layers import Job, Parameter, job_of, parameters_of
from steps import FUSION_BYTES, Link, Step, horovod_step, ring_s, torch_ring_step

from torch_ring.optimizer.buckets import LAST_BUCKET_BYTES

# Two layers; the second has most of the elements, the first most of the work.
JOB = Job((Parameter(1000, 3e6), Parameter(9_000_000, 1e6)), compute_s=0.6)

links = st.builds(Link, st.floats(1e8, 1e12), st.floats(1e-7, 1e-3))
jobs = st.builds(
    Job,
    st.lists(
        st.builds(Parameter, st.integers(1, 10**8), st.floats(1e3, 1e12)), min_size=1, max_size=20
    ),
    st.floats(1e-3, 10),
)
variants = st.sampled_from(sorted(clusters.VARIANTS)).map(clusters.VARIANTS.__getitem__)
# The choice of torch_ring's own algorithms has a link of its own: with another link, more hosts may
# choose better than fewer.
without_choice = variants.filter(lambda v: v.allreduce_s is not clusters.own_hierarchical_s)
machines = st.builds(
    lambda network, local, control: replace(
        clusters.A100, network=network, local=local, control=control
    ),
    links,
    links,
    links,
)


def test_horovod_fills_its_buffer() -> None:
    numel = FUSION_BYTES // 4 // 3
    job = Job([Parameter(numel, 1.0)] * 7, compute_s=7.0)
    step = horovod_step(job, FUSION_BYTES)
    assert [bucket.bytes for bucket in step.buckets] == [12.0 * numel, 12.0 * numel, 4.0 * numel]
    assert [round(bucket.ready_s, 2) for bucket in step.buckets] == [4.34, 6.34, 7.0]
    alone = horovod_step(Job([Parameter(FUSION_BYTES, 1.0)] * 2, 1.0), FUSION_BYTES)
    assert len(alone.buckets) == 2  # larger than the buffer: each by itself


def test_torch_ring_sends_its_own_plan() -> None:
    job = Job([Parameter(10_000, 1.0)] * 1500, compute_s=1.0)
    step = torch_ring_step(job, torch.bfloat16)
    whole = sum(bucket.bytes for bucket in step.buckets)
    assert 2 * 15e6 <= whole < 2.02 * 15e6  # 16 bits, and a little alignment
    assert step.buckets[-1].bytes <= LAST_BUCKET_BYTES / 2
    assert step.buckets[-1].ready_s == pytest.approx(1.0)
    ready = [bucket.ready_s for bucket in step.buckets]
    assert ready == sorted(ready)
    assert len(ready) > 2


def test_agreement() -> None:
    cluster = replace(clusters.A100, control=Link(1e9, 1e-5))
    assert clusters.board_s(100, cluster, ranks=8) == 0  # one host has shared memory
    assert clusters.board_s(100, cluster, 32) == pytest.approx(2 * (1e-5 + 100 / 1e9))
    # Twice the hosts: one frame more, and no longer one.
    few, many = clusters.board_s(100, cluster, 4096), clusters.board_s(100, cluster, 8192)
    assert many - few == pytest.approx(1e-5 + 100 / 1e9)
    before, closing = zip(clusters.frame_bytes(8), clusters.frame_bytes(648), strict=True)
    assert before[0] == before[1] == 152  # tests/cpp/frames_test.cc: a frame of equal entries
    assert closing[1] == closing[0] + 640 // 8  # a bit for each parameter


def test_needs_of_a_world() -> None:
    link = Link(bandwidth=1e9, latency_s=1e-5)
    one = world_limits.needs_of(8, 8, link)
    assert (one.control, one.data, one.alltoall, one.store_operations) == (7, 0, 0, 0)
    assert one.store_s == 0
    # 4,096 ranks on 512 hosts: tests/cpp/control_graph_test.cc has the bound of a Chord ring.
    many = world_limits.needs_of(4096, 8, link)
    assert (many.control, many.data, many.alltoall) == (26, 63, 511)
    assert many.store_operations == 4 * 512
    assert many.table_bytes == 4096 * world_limits.TABLE_BYTES
    assert many.store_s == pytest.approx(4 * 512 * 1e-5 + 511 * many.table_bytes / 1e9)


def test_allreduces_are_alike_where_they_must_be() -> None:
    """Inside one host all hierarchies are its ring; a tree never loses to a ring."""
    for ranks in (2, 8):
        inside = ring_s(1e8, ranks, clusters.A100.local)
        for function in (clusters.hierarchical_s, clusters.own_hierarchical_s, clusters.nccl_s):
            assert function(1e8, clusters.A100, ranks) == pytest.approx(inside)
    for ranks in (16, 1024, 100_000):
        hierarchical = clusters.hierarchical_s(1e8, clusters.A100, ranks)
        assert clusters.nccl_s(1e8, clusters.A100, ranks) <= hierarchical
        assert hierarchical < clusters.flat_ring_s(1e8, clusters.A100, ranks)


def test_choice_is_that_of_the_core() -> None:
    """The boundaries are those of tests/cpp/choice_test.cc."""
    boundaries = {
        5: (18_751, 374_999),
        6: (13_847, 719_999),
        7: (10_938, 1_049_999),
        8: (9_023, 1_371_428),
        9: (7_671, 1_349_999),
        16: (3_721, 3_519_999),
        17: (6_930, 3_506_249),
        64: (1_630, 17_371_428),
        128: (798, 36_283_464),
        4096: (37, 1_225_199_120),
    }
    for ranks, (scattered, ring) in boundaries.items():
        sizes = (1, scattered - 1, scattered, 1 << 33)
        chosen = [choice.choose_allreduce(size_bytes, ranks) for size_bytes in sizes]
        assert chosen == ["gathered", "gathered", "scattered", "scattered"]
        chosen = [choice.choose_allgather(size_bytes, ranks) for size_bytes in (ring - 1, ring)]
        assert chosen == ["doubling", "ring"]
    for ranks in (2, 3, 4):
        chosen = [choice.choose_allreduce(size_bytes, ranks) for size_bytes in (65_536, 65_537)]
        assert chosen == ["gathered", "scattered"]
        assert choice.choose_allgather(1, ranks) == "ring"


@given(jobs, machines, without_choice)
def test_efficiency_falls_with_ranks(
    job: Job, cluster: clusters.Cluster, variant: clusters.Variant
) -> None:
    found = [clusters.efficiency(job, cluster, variant, 8 * 2**k, 0.02) for k in range(14)]
    assert all(0 < value <= 1 / 1.02 + 1e-9 for value in found)
    # Twice the hosts double a ring's steps and all but its bytes.
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(found))


@given(jobs, machines, variants, st.integers(1, 4000))
def test_a_better_network_is_never_worse(
    job: Job, cluster: clusters.Cluster, variant: clusters.Variant, hosts: int
) -> None:
    network = cluster.network
    better = replace(cluster, network=Link(2 * network.bandwidth, network.latency_s / 2))
    ranks = hosts * cluster.gpus_per_host
    before = clusters.efficiency(job, cluster, variant, ranks)
    assert clusters.efficiency(job, better, variant, ranks) >= before * (1 - 1e-9)


# --- with the models of torchvision


@pytest.fixture(scope="module")
def steps() -> dict[str, Step]:
    pytest.importorskip("torchvision")
    return {
        name: horovod_step(job_of(name, scaling_model.IMAGES, rate), FUSION_BYTES)
        for name, rate in scaling_model.MODELS.items()
    }


def test_layers_of_torchvision() -> None:
    pytest.importorskip("torchvision")
    # The tables of torchvision's documentation, in elements and billions of multiplications.
    known = {"inception_v3": (27_161_264 - 3_326_696, 5.71), "vgg16": (138_357_544, 15.47)}
    for name, (numel, work) in known.items():
        parameters = parameters_of(name)
        assert sum(p.numel for p in parameters) == numel
        assert sum(p.work for p in parameters) / 1e9 == pytest.approx(work, abs=0.01)
    *_, weight, bias = parameters_of("vgg16")
    assert (weight.numel, bias.numel, bias.work) == (4096 * 1000, 1000, 0)


def test_published_efficiencies(steps: dict[str, Step]) -> None:
    """All cells are within three points; those of 512 GPUs also without them in the fit."""
    pytest.importorskip("scipy")
    published = scaling_model.PUBLISHED
    fitted = scaling_model.fit(list(steps.values()), published)
    seen = {n: cells for n, cells in published.items() if n != scaling_model.HELD_OUT}
    held_out = scaling_model.fit(list(steps.values()), seen)
    cells = scaling_model.cells_of(steps, fitted, held_out)
    assert len(cells) == 9
    for cell in cells:
        assert abs(cell.fitted - cell.published) < 0.03, cell
        assert abs(cell.held_out - cell.published) < 0.03, cell
    # The result is possible: less than the line has, more than a microsecond.
    assert 2.0e9 < fitted.link.bandwidth < 25e9 / 8
    assert 5e-6 < fitted.link.latency_s < 50e-6
    assert 0 < fitted.slowdown < 0.04
    assert math.isclose(fitted.link.bandwidth / (25e9 / 8), clusters.LINE_SHARE, abs_tol=0.02)
