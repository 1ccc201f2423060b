# SPDX-License-Identifier: Apache-2.0
"""Calls of a store that does not answer: they end at the deadline, or at a signal."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from bell import Bell, a_signal_after
from pool import error_of, eventually, run
from ports import free_port
from slow import slow
from torch.distributed import DistError, TCPStore

import torch_ring as hvd
import torch_ring.setup.store as store_module
import torch_ring.setup.store_client as store_client
from torch_ring._C import StoreCall
from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, PeerLostError, TimeoutError
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline
from torch_ring.setup.store import locate_store
from torch_ring.setup.store_client import StoreClient, addresses_of, open_store


def take_loopback_for_a_network() -> None:
    """Treat 127.0.0.1 as a network; otherwise such a job is on one host, and needs no store."""
    store_module.is_loopback_name = lambda _: False  # in a process of this test's own


# --- a server that accepts connections and says nothing


def open_a_silent_store(interrupted: bool) -> tuple[str, float]:
    take_loopback_for_a_network()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        deadline = Deadline(60.0 if interrupted else 1.5)
        place = locate_store(
            Identity(1, 2, launcher="env"), Config(), deadline, environment=environment
        )
        began = time.monotonic()
        try:
            with a_signal_after(0.5 if interrupted else 60.0):
                place.open(deadline)
        except (Bell, TimeoutError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
        return "nothing", 0.0


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_silent_server(interrupted):
    [(text, seconds)] = run(open_a_silent_store, 1, args=[interrupted], initialized=False)
    assert seconds < 5
    if interrupted:
        assert text == "Bell: "
    else:
        assert "accepts connections, but has not answered as rank 0's store within 1.5 s" in text
        assert "does another program have its port (MASTER_PORT)?" in text


# --- a store that ends while a rank connects to it

WHO = "the store of this test"


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_store_that_ends_meanwhile_is_given_up(monkeypatch, is_reset):
    """torch would try until its timeout."""
    monkeypatch.setattr(store_client, "CONNECT_S", 30.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def end() -> None:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(listener.accept()[0]) for _ in range(2)]
            stack.enter_context(listener)
            for each in connections if is_reset else ():
                linger_for_0_s = (1).to_bytes(4, "little") + bytes(4)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_0_s)

    thread = threading.Thread(target=end)
    thread.start()
    expected = f"{WHO}: .*(it has ended|reset by peer)"
    with pytest.raises(PeerLostError, match=expected):
        open_store(listener.getsockname(), WHO)
    thread.join()


def test_where_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(PeerLostError, match=f"{WHO}: .*refused"):
        open_store(address, WHO)


# --- a rank 0 that cannot reach its own store


def test_rank_0_gives_a_store_up_that_it_cannot_reach():
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        with (
            socket.create_server(("127.0.0.2", port)),
            pytest.raises(TimeoutError, match=r"rank 0 cannot reach .* at 127\.0\.0\.2:"),
        ):
            store_module._serve(("127.0.0.2", port), Deadline(0.3), lambda: None, listener=own)


def test_addresses_are_found_and_missing_ones_named():
    assert addresses_of("127.0.0.3", Deadline(20), lambda: None) == ["127.0.0.3"]
    assert "127.0.0.1" in addresses_of("localhost", Deadline(20), lambda: None)
    with pytest.raises(InvalidArgumentError, match="'no such host'"):
        addresses_of("no such host", Deadline(20), lambda: None)


# --- a deadline consumed before


def over() -> Deadline:
    deadline = Deadline(20)
    deadline.end()
    return deadline


def test_a_store_that_answers_is_not_blamed_for_a_deadline_that_is_over():
    address = ("127.0.0.1", free_port())
    served = store_module._serve(address, over(), lambda: None)
    served.set("key", "value")
    store_module._stores.clear()  # as another process
    deadline = Deadline(20)
    reached = store_module._connect(address, "rank 0", deadline, deadline.end)
    assert reached.get("key") == b"value"
    store_module._stores.clear()
    store_module._served.clear()


# --- a silent store


class SilentStore(dist.Store):
    """A store whose server is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.go_on.wait(30)
        return amount


def test_a_silent_store_that_is_given_up():
    store = SilentStore()
    client = StoreClient(store, Deadline(0.2), "the store")
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"the store has not answered within 0\.2 s"):
            client.add("key", 1)
    assert time.monotonic() - began < 10
    store.go_on.set()

    store = SilentStore()
    client = StoreClient(store, Deadline(60), "the store")
    with a_signal_after(0.2), pytest.raises(Bell):
        client.add("key", 1)
    store.go_on.set()
    assert client.add("key", 7) == 7  # it was only slow: failures can be reported


# --- a stopped rank 0


def become_a_node() -> int:
    """Make this rank the only one of a node, so that ranks meet in rank 0's store; return it."""
    take_loopback_for_a_network()
    rank = os.environ["RANK"]
    os.environ |= {"GROUP_RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return int(rank)


def on_nodes() -> dict[str, str]:
    return {
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def has_begun_to_listen() -> bool:
    """Return whether rank 0 has made its store, even if it is stopped."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))) == 0


def init_while_rank_0_is_stopped(when: str) -> tuple[str, float] | None:
    if become_a_node() == 0:
        identity, deadline = Identity(0, 3, launcher="env", node="0"), Deadline(30.0)
        os.environ.pop("TORCHELASTIC_RUN_ID")
        store = locate_store(identity, Config(), deadline).open(deadline)
        while when == "later" and store.add("0/places", 0) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    os.environ.pop("TORCHELASTIC_RUN_ID")  # "env": the prefix of the keys is the same then
    assert eventually(has_begun_to_listen, 20.0)
    began = time.monotonic()
    _, text = error_of(hvd.init)
    return text, time.monotonic() - began


@pytest.mark.parametrize("when", ["at once", slow("later")])
def test_rank_0_stopped_during_init(when):
    env = on_nodes() | {"TORCH_RING_INIT_TIMEOUT": "2"}
    outcomes = run(
        init_while_rank_0_is_stopped, 3, args=[when], initialized=False, env=env, may_die=[0]
    )
    for text, seconds in outcomes[1:]:
        assert f"127.0.0.1:{env['MASTER_PORT']}" in text
        assert "rank 0" in text
        assert "has not answered" in text
        assert seconds < 15


# --- the store after init()


def use_the_port_of_the_store() -> None:
    rank = become_a_node()
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    for _ in range(3):
        hvd.init()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
        hvd.shutdown()
    hvd.init()
    dist.init_process_group("gloo")  # its rank 0 serves a store at the same port
    dist.barrier()
    hvd.shutdown()
    hvd.init()  # in the store of torch.distributed
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(hvd.size()))
    hvd.barrier()
    hvd.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def test_the_store_of_rank_0_ends_when_all_have_met():
    run(use_the_port_of_the_store, 3, initialized=False, env=on_nodes())


def test_a_store_that_is_gone_is_an_error():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = StoreCall.connect("127.0.0.1", server.port, 5.0)
    assert call.wait(20)
    client = StoreClient(call.result(), Deadline(20), "it")
    client.set("key", "value")
    del server
    with pytest.raises(DistError):
        client.get("key")
