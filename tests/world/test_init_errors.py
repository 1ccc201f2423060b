"""Errors of init(), and of calls before it."""

import os

import pytest
import torch
from pool import RanksFailed, run

import torch_ring as hvd


def call_before_init() -> None:
    for call in (hvd.rank, hvd.size, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"call init\(\) first"):
            call()
    assert not hvd.is_initialized()


def test_use_before_init():
    run(call_before_init, 1, initialized=False)


def call_init_like_init_process_group() -> None:
    """The first arguments of init() are no rank, size or backend."""
    for arguments in ((0, 2), ("gloo",)):
        with pytest.raises(ValueError, match=r"give rank and size by name, as in init\(rank=0"):
            hvd.init(*arguments)
    assert not hvd.is_initialized()


def test_rank_and_size_without_names():
    run(call_init_like_init_process_group, 1, initialized=False)


def test_missing_ranks_are_named():
    def message(failed: RanksFailed) -> str:
        return str(failed)

    env = {"TORCH_RING_INIT_TIMEOUT": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(RanksFailed) as failed:
        run(hvd.rank, 2, env=env)
    assert "ranks 2, 3 of 4 did not arrive" in message(failed.value)


def test_a_bad_setting_is_named():
    with pytest.raises(RanksFailed, match="TORCH_RING_TIMEOUT='soon': must be a number"):
        run(hvd.rank, 1, env={"TORCH_RING_TIMEOUT": "soon"})


def init_with_own_secret() -> None:
    os.environ["TORCH_RING_SECRET"] = "of rank " + os.environ["RANK"]
    os.environ["TORCH_RING_INIT_TIMEOUT"] = "3"
    hvd.init()


def test_different_secrets_are_refused():
    with pytest.raises(RanksFailed, match="secret"):
        run(init_with_own_secret, 2, initialized=False)
