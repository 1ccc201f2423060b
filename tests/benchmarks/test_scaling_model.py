"""The model of scaling: torch_ring's buckets and choices, and Horovod's published efficiencies."""

from __future__ import annotations

import math

import choice
import clusters
import pytest
import scaling_model
import torch
from layers import Job, Parameter, job_of
from steps import FUSION_BYTES, Step, horovod_step, torch_ring_step

from torch_ring.optimizer.buckets import LAST_BUCKET_BYTES


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


def test_choice_is_that_of_the_core() -> None:
    """The boundaries equal those in tests/cpp/choice_test.cc."""
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


# --- with the models of torchvision


@pytest.fixture(scope="module")
def steps() -> dict[str, Step]:
    pytest.importorskip("torchvision")
    return {
        name: horovod_step(job_of(name, scaling_model.IMAGES, rate), FUSION_BYTES)
        for name, rate in scaling_model.MODELS.items()
    }


def test_published_efficiencies(steps: dict[str, Step]) -> None:
    """All cells are within three points; those of 512 GPUs even if the fit excludes them."""
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
    # The result is possible: less than the line rate, more than a microsecond.
    assert 2.0e9 < fitted.link.bandwidth < 25e9 / 8
    assert 5e-6 < fitted.link.latency_s < 50e-6
    assert 0 < fitted.slowdown < 0.04
    assert math.isclose(fitted.link.bandwidth / (25e9 / 8), clusters.LINE_SHARE, abs_tol=0.02)
