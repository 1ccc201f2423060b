# SPDX-License-Identifier: Apache-2.0
"""The store of a job: its address, and the rank that serves it."""

import json
import os
import sys

import pytest
import torch
from on_ranks import on_ranks
from pool import run
from ports import free_port

import torch_ring as hvd
from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, RingError, TimeoutError
from torch_ring.setup import store
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline


def become_a_rank_of_horovodrun() -> None:
    """Replace the environment by horovodrun's, which gives no address."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    ours = ("MASTER_", "TORCHELASTIC_", "GROUP_", "RANK", "LOCAL_", "WORLD_")
    for name in [name for name in os.environ if name.startswith(ours)]:
        del os.environ[name]
    os.environ |= {"HOROVOD_RANK": rank, "HOROVOD_SIZE": size, "HOROVOD_LOCAL_SIZE": size}


@on_ranks(3, initialized=False)
def test_on_one_host_without_an_address() -> None:
    become_a_rank_of_horovodrun()
    for _ in range(2):
        hvd.init()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
        hvd.shutdown()
    assert not store._stores  # the ranks of one host need none


@on_ranks(2, initialized=False)
def test_ranks_by_argument() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"RANK": "17", "WORLD_SIZE": "100"}
    hvd.init(rank=rank, size=size, local_rank=0, local_size=1)
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size()) == (0, 1)


def fail_on_rank_0() -> str:
    if os.environ["RANK"] == "0":
        os.environ["TORCH_RING_INTERFACE"] = "nope0"
    with pytest.raises((RingError, InvalidArgumentError)) as raised:
        hvd.init()
    return str(raised.value)


def test_rank_0_tells_why_it_fails_before_its_store_ends():
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    for text in run(fail_on_rank_0, 3, initialized=False, env=env):
        assert "TORCH_RING_INTERFACE='nope0'" in text


# --- the choice of an address


def find(identity, environment, config=Config(), **more):  # noqa: B008  it cannot change
    deadline = Deadline(5.0)
    return store.locate_store(identity, config, deadline, environment=environment, **more)


@pytest.mark.parametrize(
    ("launcher", "environment", "message"),
    [
        ("env", {}, "the 2 ranks of RANK and WORLD_SIZE .* MASTER_PORT .* on all of them$"),
        ("Open MPI", {}, "the 2 ranks of Open MPI may be on several hosts: set MASTER_ADDR"),
        ("Open MPI", {}, r"127\.0\.0\.1 if all are on this one"),
        ("srun", {}, "SLURM_STEP_NODELIST is not set: set MASTER_ADDR"),
        ("env", {"MASTER_ADDR": "x", "MASTER_PORT": "http"}, "MASTER_PORT='http': must be a port"),
        ("env", {"MASTER_ADDR": "x", "MASTER_PORT": "65536"}, "MASTER_PORT='65536'"),
    ],
)
def test_missing_and_wrong_addresses_are_named(monkeypatch, launcher, environment, message):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # to import it is an ImportError
    with pytest.raises(InvalidArgumentError, match=message):
        find(Identity(1, 2, launcher=launcher), environment)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_a_job_at_a_loopback_address_is_on_one_host(host):
    for config in (Config(), Config(secret="hush")):
        assert find(Identity(1, 2, launcher="env"), {"MASTER_ADDR": host}, config) is None


def test_one_node_needs_a_store_only_if_its_ranks_cannot_meet_and_have_a_secret():
    """In containers with separate networks, the ranks meet in the store, if that is safe."""
    identity = Identity(1, 2, 1, 2, launcher="torchrun")
    assert find(identity, {"MASTER_ADDR": "10.0.0.1"}) is None
    found = find(identity, {"MASTER_ADDR": "10.0.0.1"}, Config(secret="hush"))
    assert found is not None
    assert found.host == "10.0.0.1"


@pytest.mark.parametrize(
    ("rank", "node", "local_rank", "serves"),
    [(0, "n2", "0", False), (1, "n1", "0", True), (2, "n1", "1", False)],
)
def test_the_store_of_a_slurm_step_is_on_the_first_node(rank, node, local_rank, serves):
    """Rank 0 may be on another node: in a heterogeneous job, or if a file assigns the ranks."""
    found = find(
        Identity(rank, 3, int(local_rank), nodes=2, launcher="srun", job="7/0"),
        {
            "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURMD_NODENAME": node,
            "SLURM_LOCALID": local_rank,
        },
    )
    assert found is not None
    assert (found.host, found.serves) == ("n1", serves)


def test_steps_of_a_slurm_job_have_ports_of_their_own():
    ports = [
        store._slurm_port(Identity(rank, 2, job=job))
        for job in ("4711/0", "4711/1", "4712/0")
        for rank in (0, 1)
    ]
    assert ports[0::2] == ports[1::2]
    assert len(set(ports)) == 3
    assert all(10_000 <= port < 30_000 for port in ports)


@pytest.fixture
def _fresh_stores():
    yield
    for known in (
        store._stores,
        store._served,
        store._mpi_addresses,
        store._secrets,
    ):
        known.clear()


class FakeCommunicator:
    """A communicator of mpi4py, as seen by rank 0 and then by another rank."""

    def __init__(self, silent=False):
        self.said, self.silent = [], silent

    def Ibcast(self, buffer, root):  # noqa: N802  mpi4py's name
        assert root == 0
        if self.said:
            buffer[:] = self.said[0]
        self.said.append(bytes(buffer))
        return self

    def Test(self):  # noqa: N802
        return not self.silent


@pytest.mark.usefixtures("_fresh_stores")
def test_mpi_broadcasts_the_address():
    deadline = Deadline(5.0)
    comm = FakeCommunicator()
    identity = Identity(0, 2, 0, 1, launcher="Open MPI")
    first = store._ask_mpi(comm, identity, Config(interface="lo"), deadline)
    assert json.loads(comm.said[0]) == list(first)
    assert first[0] == "127.0.0.1"
    assert store._ask_mpi(comm, identity, Config(), deadline) == first
    assert len(comm.said) == 1


@pytest.mark.usefixtures("_fresh_stores")
def test_mpi_carries_a_secret():
    comm, found = FakeCommunicator(), []
    environment = {"MASTER_ADDR": "10.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for rank in (0, 1):
        store.forget()
        identity = Identity(rank, 2, 0, 1, launcher="init")
        found.append(find(identity, environment, comm=comm).key.secret)
    assert found[0] == found[1]
    assert len(found[0]) == 64


@pytest.mark.usefixtures("_fresh_stores")
def test_mpi_that_is_silent_is_given_up_and_asked_no_second_time():
    comm, identity = FakeCommunicator(silent=True), Identity(1, 2)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"rank 0's secret has not arrived over MPI"):
            store.common_secret(comm, identity, Deadline(0.01))
    comm.silent = False
    assert store.common_secret(comm, identity, Deadline(20)) is None  # no process was rank 0 here
    assert len(comm.said) == 1


def locate_stores() -> bool:
    """Return whether MPI has been loaded."""
    for launcher in ("Open MPI", "Hydra", "PMI", "srun", "torchrun", "env"):
        identity = Identity(1, 2, 0, 1, launcher=launcher)
        assert find(identity, {"MASTER_ADDR": "10.0.0.1"}).key.secret == ""
    return "mpi4py.MPI" in sys.modules


def test_mpi_is_not_initialized_for_a_secret():
    assert run(locate_stores, 1, initialized=False) == [False]


@pytest.mark.usefixtures("_fresh_stores")
def test_mpi_broadcasts_the_failure():
    comm = FakeCommunicator()
    with pytest.raises(RingError, match=r"cannot serve .* TORCH_RING_INTERFACE='nope0'"):
        store._ask_mpi(comm, Identity(0, 2), Config(interface="nope0"), Deadline(5.0))
    with pytest.raises(RingError, match="TORCH_RING_INTERFACE='nope0'"):
        store._ask_mpi(comm, Identity(1, 2), Config(), Deadline(5.0))
