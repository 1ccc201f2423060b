"""A rank may start no more threads, at init() and later: all ranks get its rank and the reason."""

import os
import resource

import pytest
import torch
from pool import error_of, run

import torch_ring as hvd

USER = 23451  # root is not limited; this user has no other processes

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def run_out_of_threads(at_init: bool) -> tuple[str, str]:
    os.setuid(USER)
    rank = int(os.environ["RANK"])

    def limit() -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))

    if at_init:
        limit()
        return error_of(hvd.init)
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    hvd.barrier()
    limit()
    if pair.included():
        return error_of(lambda: hvd.allreduce(torch.ones(3), process_set=pair))
    return error_of(hvd.barrier)


@pytest.mark.parametrize("at_init", [True, False])
def test_a_rank_without_threads(at_init):
    for kind, text in run(run_out_of_threads, 3, args=[at_init], initialized=False)[:2]:
        assert kind in ("RingError", "PeerLostError"), text
        assert "rank 1" in text
        assert "cannot start a thread: Resource temporarily unavailable" in text
        assert "raise `ulimit -u` (now 1)" in text
