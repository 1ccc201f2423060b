# SPDX-License-Identifier: Apache-2.0
"""Under ``mpirun -n 2 python -m pytest --with-mpi``: hosts at an address get a secret over MPI."""

import os

import pytest
import torch
from mpi4py import MPI

import torch_ring as hvd
from torch_ring.config import Config
from torch_ring.setup import connect, store
from torch_ring.setup import store as store_module
from torch_ring.setup.launchers import discover
from torch_ring.setup.network import Deadline
from torch_ring.world import current

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def _hosts(monkeypatch):
    """Makes each rank believe that it is alone on its host, and that the loopback is a network."""
    with store_module.socket.create_server(("127.0.0.1", 0)) as free:
        port = MPI.COMM_WORLD.bcast(free.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    monkeypatch.setattr(store_module, "is_loopback_name", lambda _: False)
    host = f"host {MPI.COMM_WORLD.rank} of {os.getppid()}"
    monkeypatch.setattr(store_module, "socket_name", lambda _: f"\0{host}")
    make = connect.PeerInfo
    monkeypatch.setattr(connect, "PeerInfo", lambda **fields: make(**fields | {"machine": host}))
    monkeypatch.setattr(connect, "_require_addresses", lambda _: None)
    store.forget()
    yield
    store.forget()


@pytest.mark.usefixtures("_hosts")
def test_all_ranks_have_one_secret():
    place = store_module.locate_store(discover(), Config(), Deadline(40.0))
    everyone = MPI.COMM_WORLD.allgather(place.key.secret)
    assert len(everyone[0]) == 64
    assert set(everyone) == {everyone[0]}
    if MPI.COMM_WORLD.rank == 0:
        part = store_module.locate_store(discover().among((0,)), Config(), Deadline(40.0))
        assert len(part.key.secret) == 64
        assert part.key.secret != place.key.secret


@pytest.mark.usefixtures("_hosts")
def test_a_job_at_an_address_is_closed():
    hvd.init()
    assert hvd.cross_size() == hvd.size()
    assert not current.world().is_guarded  # strangers cannot know its key
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    hvd.shutdown()
