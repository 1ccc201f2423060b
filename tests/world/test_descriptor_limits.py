"""Few descriptors: init() raises the soft limit; without enough it fails, on all ranks."""

import contextlib
import os
import resource

import pytest
import torch
from pool import error_of, run

import torch_ring as hvd
from torch_ring.setup import connect


@contextlib.contextmanager
def limited(soft: int):
    """Limit the descriptors of this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def init_with_a_low_limit() -> None:
    with limited(256):
        hvd.init()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft > 256
        size = hvd.size()
        assert hvd.allreduce(torch.ones(1000), op=hvd.Sum).eq(size).all()
        pair = hvd.add_process_set([0, size - 1])
        if pair.included():
            assert hvd.allreduce(torch.ones(1000), op=hvd.Sum, process_set=pair).eq(2).all()
        hvd.barrier()
        assert len(os.listdir("/proc/self/fd")) < 128
        hvd.shutdown()


@pytest.mark.slow
def test_thirty_two_ranks_with_a_low_limit():
    run(init_with_a_low_limit, 32, initialized=False)


def init_without_descriptors(spare: int, broken: int) -> tuple[str, str]:
    connect._raise_descriptor_limit = lambda *_: None  # as with a low hard limit
    rank = int(os.environ["RANK"])
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(len(taken) + 100) if number not in taken]
    with limited(free[spare + 1] if rank == broken else soft):  # one was this listing's
        outcome = error_of(hvd.init)
        if outcome[0] == "nothing":
            outcome = error_of(lambda: hvd.allreduce(torch.ones(10)))
        hvd.shutdown()
    return outcome


@pytest.mark.slow
def test_a_rank_without_descriptors_fails_all():
    failed = 0
    for transport in ("shm", "tcp"):
        for spare in range(0, 15, 3):
            outcomes = run(
                init_without_descriptors,
                3,
                args=(spare, spare % 5 % 3),
                transport=transport,
                initialized=False,
                env={"TORCH_RING_INIT_TIMEOUT": "8"},
            )
            kinds = {kind for kind, _ in outcomes}
            failed += "nothing" not in kinds
            assert "nothing" not in kinds or len(kinds) == 1, outcomes
            for kind, text in outcomes:
                # A rank without any descriptor cannot report to the others why it does not come.
                is_told = (
                    "Too many open files: raise `ulimit -n` (now" in text
                    and f"rank {spare % 5 % 3}" in text
                )
                is_missed = spare == 0 and "rank 0 of 3 did not arrive" in text
                assert kind == "nothing" or is_told or is_missed, outcomes
    assert failed >= 4
