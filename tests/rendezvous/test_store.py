"""Where the ranks meet."""

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from pool import run

import torch_ring as hvd
from torch_ring import local_meeting, network, rendezvous
from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, RingError, TimeoutError
from torch_ring.launchers import Identity
from torch_ring.meeting import Deadline


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def started_by_horovodrun() -> int:
    """Put on the environment of another launcher, which gives no address; return the rank."""
    rank, size = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
    for name in [n for n in os.environ if n.startswith(("MASTER_", "TORCHELASTIC_", "GROUP_"))]:
        del os.environ[name]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    os.environ |= {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": size, "HOROVOD_LOCAL_SIZE": size}
    return rank


def joins_again_and_again() -> None:
    for _ in range(5):
        hvd.init()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
        hvd.shutdown()


def joins_without_an_address() -> None:
    rank = started_by_horovodrun()
    joins_again_and_again()
    ((_, secret),) = rendezvous._points.values()
    assert len(secret) == 64
    assert len(rendezvous._served) == (rank == 0)


def test_on_one_host_without_an_address():
    run(joins_without_an_address, 3, initialized=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_at_an_address(host):
    env = {
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": host,
        "MASTER_PORT": free_port(),
    }
    run(joins_again_and_again, 2, initialized=False, env=env)


def joins_by_its_own_count() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"RANK": "17", "WORLD_SIZE": "100"}
    hvd.init(rank=rank, size=size, local_rank=0, local_size=1)
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size()) == (0, 1)


def test_ranks_by_argument():
    run(joins_by_its_own_count, 2, initialized=False)


def joins_in_vain(without_address: bool) -> str | None:
    rank = started_by_horovodrun() if without_address else int(os.environ["RANK"])
    if rank == 0:
        return None  # and never says so
    with pytest.raises(TimeoutError) as raised:
        hvd.init()
    assert not hvd.is_initialized()
    return str(raised.value)


@pytest.mark.parametrize("without_address", [True, False])
def test_rank_0_never_comes(without_address):
    env = {
        "TORCH_RING_INIT_TIMEOUT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    texts = run(joins_in_vain, 3, initialized=False, env=env, args=[without_address])
    assert all("rank 0 did not arrive" in text for text in texts[1:])


def fails_on_rank_0() -> str:
    if os.environ["RANK"] == "0":
        os.environ["TORCH_RING_INTERFACE"] = "nope0"
    with pytest.raises((RingError, InvalidArgumentError)) as raised:
        hvd.init()
    return str(raised.value)


def test_rank_0_tells_why_it_fails_before_it_takes_its_store_away():
    env = {
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    for text in run(fails_on_rank_0, 3, initialized=False, env=env):
        assert "TORCH_RING_INTERFACE='nope0'" in text


def forks() -> None:
    started_by_horovodrun()
    hvd.init()
    child = os.fork()
    if child == 0:
        try:
            assert hvd.is_initialized()  # it can ask who its parent is
            hvd.shutdown()
            assert not hvd.is_initialized()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3


def test_a_child_does_not_disturb_its_parents_world():
    run(forks, 2, initialized=False)


# --- the choice of an address


def meet(identity, environment):
    with rendezvous.meet(identity, Config(), Deadline(5.0), environment=environment) as met:
        return met


@pytest.mark.parametrize(
    ("launcher", "environment", "message"),
    [
        ("env", {}, "set MASTER_ADDR .* and MASTER_PORT .* on all of them$"),
        ("srun", {}, "SLURM_STEP_NODELIST is not set: set MASTER_ADDR"),
        ("env", {"MASTER_ADDR": "x", "MASTER_PORT": "http"}, "MASTER_PORT='http': must be a port"),
        ("env", {"MASTER_ADDR": "x", "MASTER_PORT": "65536"}, "MASTER_PORT='65536'"),
    ],
)
def test_no_way_to_meet(launcher, environment, message):
    with pytest.raises(InvalidArgumentError, match=message):
        meet(Identity(1, 2, launcher=launcher), environment)


def test_steps_of_a_slurm_job_have_ports_of_their_own():
    ports = [
        rendezvous._slurm_port(Identity(rank, 2, job=job))
        for job in ("4711/0", "4711/1", "4712/0")
        for rank in (0, 1)
    ]
    assert ports[0::2] == ports[1::2]
    assert len(set(ports)) == 3
    assert all(10_000 <= port < 30_000 for port in ports)


@pytest.fixture
def _stores_of_its_own():
    yield
    for known in (rendezvous._stores, rendezvous._served, rendezvous._points, rendezvous._by_mpi):
        known.clear()


class Communicator:
    """mpi4py's, as rank 0 and then another rank see it."""

    def __init__(self):
        self.said = []

    def bcast(self, value, root):
        assert root == 0
        self.said.append(value or self.said[0])
        return self.said[-1]


@pytest.mark.usefixtures("_stores_of_its_own")
def test_mpi_hands_the_address_round():
    deadline = Deadline(5.0)
    comm = Communicator()
    identity = Identity(0, 2, 0, 1, launcher="Open MPI")
    first = rendezvous._ask_mpi(comm, identity, Config(interface="lo"), deadline)
    assert comm.said == [first]
    assert first[0] == "127.0.0.1"
    assert rendezvous._ask_mpi(comm, identity, Config(), deadline) == first
    assert len(comm.said) == 1


@pytest.mark.usefixtures("_stores_of_its_own")
def test_mpi_hands_the_failure_round():
    comm = Communicator()
    with pytest.raises(RingError, match=r"cannot serve .* TORCH_RING_INTERFACE='nope0'"):
        rendezvous._ask_mpi(comm, Identity(0, 2), Config(interface="nope0"), Deadline(5.0))
    with pytest.raises(RingError, match="TORCH_RING_INTERFACE='nope0'"):
        rendezvous._ask_mpi(comm, Identity(1, 2), Config(), Deadline(5.0))


def test_own_address(monkeypatch):
    routes = {"here": "127.0.1.1", "there": "10.0.0.7", network._ELSEWHERE: "192.168.0.7"}
    monkeypatch.setattr(network, "_source_address", lambda host: routes.get(host, host))
    assert network.own_address("", "there") == "10.0.0.7"
    assert network.own_address("", "127.0.0.1") == "127.0.0.1"
    assert network.own_address("", "localhost") == "localhost"
    assert network.own_address("", "here") == "192.168.0.7"  # no other host finds 127.0.1.1
    assert network.own_address("", "here", one_host=True) == "127.0.1.1"
    assert network.own_address("", None) == "192.168.0.7"
    assert network.own_address("lo", "there") == "127.0.0.1"


def test_no_network_at_all(monkeypatch):
    def unreachable(host):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(network, "_source_address", unreachable)
    assert network.own_address("", None) == "127.0.0.1"


# --- meeting on one host


def test_only_processes_of_this_user_meet(monkeypatch):
    point = f"\0torch_ring test {os.getpid()}"
    with local_meeting.serve(point, b"here"):
        assert local_meeting.ask(point, Deadline(5.0)) == b"here"
        with (
            pytest.raises(RingError, match="says that it is rank 0"),
            local_meeting.serve(point, b""),
        ):
            pass
        monkeypatch.setattr(network.os, "getuid", lambda: 12345)
        with pytest.raises(TimeoutError, match="rank 0 did not arrive on this host"):
            local_meeting.ask(point, Deadline(0.2))
    with pytest.raises(TimeoutError):
        local_meeting.ask(point, Deadline(0.1))


def test_the_launcher_is_the_nearest_ancestor_without_a_rank(monkeypatch):
    wrapper = subprocess.Popen(["sleep", "60"], env={"PMI_RANK": "1"})
    try:
        monkeypatch.setattr(local_meeting, "_ancestors", lambda: iter([wrapper.pid, os.getpid()]))
        deadline = Deadline(10)
        while b"PMI_RANK" not in Path(f"/proc/{wrapper.pid}/environ").read_bytes():
            assert not deadline.passed()  # exec() shows the new environment a moment after it began
            time.sleep(0.001)
        hydra = local_meeting._starter(Identity(1, 2, launcher="Hydra"))
        assert hydra.startswith(f"{os.getpid()}.")
        assert local_meeting._starter(Identity(1, 2, launcher="init")).startswith(f"{wrapper.pid}.")
    finally:
        wrapper.kill()
        wrapper.wait()
    point = local_meeting.meeting_point
    assert point(Identity(0, 2, job="1")) == point(Identity(1, 2, job="1"))
    assert point(Identity(0, 2, job="1")) != point(Identity(0, 2, job="2"))
