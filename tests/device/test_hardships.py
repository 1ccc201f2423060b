# SPDX-License-Identifier: Apache-2.0
"""The hardships of a device on stand-ins, in small: tests/gpu has the sizes for a GPU."""

from __future__ import annotations

import ctypes
import functools
import os

import pytest
from device_double import NCCL_LIBRARY, Counts
from device_hardships import (
    ALLREDUCES,
    BUCKET_BYTES,
    BUCKETS,
    PASSES,
    count_polls,
    counting_nccl,
    fail_by_an_assertion,
    fill_the_launch_queue,
    reduce_many_elements,
    stop_and_lose_ranks,
    try_bucket_sizes,
)
from device_runs import run_on_double


def count_polls_on_double(device):
    """The double counts polls, too: those of launches in progress."""
    polls = count_polls(device)
    counting = ctypes.CDLL(os.environ["TORCH_RING_NCCL_LIBRARY"])
    assert counting.polls() >= Counts.now().polls >= ALLREDUCES + BUCKETS * PASSES
    return polls


def test_polls(tmp_path):
    env = {
        "TORCH_RING_NCCL_LIBRARY": str(counting_nccl(NCCL_LIBRARY, tmp_path)),
        "TORCH_RING_BUCKET_BYTES": str(BUCKET_BYTES),
    }
    for polls in run_on_double(count_polls_on_double, 2, is_fresh=True, **env):
        print(f"# polls on the stand-in: {polls}")
        assert min(polls.values()) >= 1


@pytest.mark.parametrize("size", [1, 2])
def test_many_elements(size):
    run_on_double(functools.partial(reduce_many_elements, 2**16 + 5), size)


@pytest.mark.parametrize("size", [1, 2])
def test_an_assertion_in_a_kernel(size, tmp_path):
    check_failures(run_on_double(functools.partial(fail_by_an_assertion, tmp_path), size))


def check_failures(failures):
    """The error of the rank whose device has failed reaches all."""
    last = len(failures) - 1
    for rank, (kind, text) in enumerate(failures):
        assert "device-side assert" in text
        assert rank == last or kind == "PeerLostError"
        assert rank == last or f"rank {last} (" in text


def test_stopped_and_killed_ranks(tmp_path):
    program = functools.partial(stop_and_lose_ranks, tmp_path, (1.0, 0.2))
    results = run_on_double(program, 4, may_die={2, 3})
    assert results == [[4, 3, 2], [4, 3, 2], None, None]


def test_bucket_sizes():
    run_on_double(functools.partial(try_bucket_sizes, 10), 2)


def test_a_full_launch_queue():
    """The stand-in's has 1,024 places."""
    program = functools.partial(fill_the_launch_queue, 1100, 0.5)
    run_on_double(program, 2, TORCH_RING_BUCKET_BYTES="1")
