# SPDX-License-Identifier: Apache-2.0
"""Under ``mpirun -n 2 python -m pytest --with-mpi``: the ranks are MPI's."""

import pytest
import torch
from mpi4py import MPI

import torch_ring as hvd

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(scope="module", autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


def test_ranks_are_those_of_mpi():
    assert hvd.rank() == MPI.COMM_WORLD.Get_rank()
    assert hvd.size() == MPI.COMM_WORLD.Get_size()
    assert MPI.COMM_WORLD.allgather(hvd.local_rank()) == list(range(hvd.size()))
    assert hvd.is_homogeneous()


def test_collectives_agree_with_mpi():
    mine = torch.arange(1000, dtype=torch.float64) * (hvd.rank() + 1)
    theirs = torch.from_numpy(MPI.COMM_WORLD.allreduce(mine.numpy()))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), theirs)
    rows = torch.full((hvd.rank() + 1, 2), hvd.rank())
    assert torch.equal(hvd.allgather(rows), torch.cat(MPI.COMM_WORLD.allgather(rows)))
    assert hvd.broadcast_object({"from": hvd.rank()}, root_rank=1) == {"from": 1}


def test_the_benchmark_measures_mpi():
    import collectives
    import peers

    peers.start_mpi()
    for collective in collectives.BUS_SHARE:
        case, _ = collectives.make_case(collective, "sum", 4096, torch.float32, "private")
        runs = peers.runs_of(case, ["mpi"])
        assert collectives.wrong_elements(case, runs) == {"torch_ring": 0, "mpi": 0}
    half, _ = collectives.make_case("allreduce", "sum", 4096, torch.float16, "private")
    assert peers.runs_of(half, ["mpi"]).keys() == {"torch_ring"}  # MPI has no such type
