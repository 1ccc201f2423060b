# SPDX-License-Identifier: Apache-2.0
"""TLS between two hosts, with a stranger on the way: a deed is an error on both.

The stranger is a proxy for the connections that a rank makes to the other one. More deeds on bare
streams, recordings, and ranks with another key or identity are in tests/cpp/tls_test.cc.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_fixtures import hosts, on_hosts, run_on_hosts
from pool import error_of
from slow import slow_after

import torch_ring as hvd
from torch_ring.setup import connect

__all__ = ["hosts"]

pytestmark = on_hosts
SECRET = "of this job"
ENV = {
    "TORCH_RING_TLS": "1",
    "TORCH_RING_SECRET": SECRET,
    "TORCH_RING_HEARTBEAT_TIMEOUT": "4",
    "TORCH_RING_TIMEOUT": "8",
}
HEADER_BYTES = 5  # of a record: its kind, a version, its length
LARGE_BYTES = 4096  # of a record with data; those of the control plane are smaller

Send = Callable[[bytes], object]
Deed = Callable[[bytes, Send], object]  # to a record


def flip(record: bytes, send: Send) -> None:
    at = len(record) // 2
    send(record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :])


def fall_silent(_: bytes, __: Send) -> None:
    threading.Event().wait()


class Stranger:
    """A proxy for connections to `target`: it does one deed, to a record of each connection."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._deed: Deed | None = None
        self._is_large = False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def do(self, deed: Deed, *, to_data: bool) -> None:
        self._deed, self._is_large = deed, to_data

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = socket.create_connection(self.target)
            for source, target in ((near, far), (far, near)):
                ends = (source, target)
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        done = None
        with contextlib.suppress(OSError):
            for record in self._records(source):
                is_next = self._deed is not done and (len(record) >= LARGE_BYTES) == self._is_large
                if is_next and self._deed is not None:
                    done = self._deed
                    done(record, target.sendall)
                else:
                    target.sendall(record)
        for end, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
            with contextlib.suppress(OSError):
                end.shutdown(how)

    def _records(self, source: socket.socket) -> Iterator[bytes]:
        with source.makefile("rb") as stream:
            while header := stream.read(HEADER_BYTES):
                yield header + stream.read(int.from_bytes(header[3:], "big"))


def put_on_the_way() -> list[Stranger]:
    """Let this rank's next worlds reach the other rank through strangers, which are returned."""
    strangers: list[Stranger] = []
    real = connect.ControlPlane

    def through(rank: int, host_of: Any, labels: Any, addresses: Any, *more: Any) -> Any:
        name, ((host, port),) = addresses[1 - rank]
        strangers.append(Stranger((host, port)))
        ways = list(addresses)
        ways[1 - rank] = name, [("127.0.0.1", strangers[-1].port)]
        return real(rank, host_of, labels, ways, *more)

    connect.ControlPlane = through  # type: ignore[misc, assignment]
    return strangers


def work(rounds: int = 1) -> None:
    for _ in range(rounds):
        values = torch.full((1 << 20,), 1.0 + hvd.rank())
        assert hvd.allreduce(values, op=hvd.Sum, name="values").eq(3).all()


def disturbed(deed: Deed, to_data: bool) -> tuple[str, str]:
    strangers = put_on_the_way()
    hvd.init()

    def work_on() -> None:  # the other rank may be slower, and still at the first
        work()
        strangers[0].do(deed, to_data=to_data)
        work(1000)

    return error_of(work_on)


ROWS = [(deed, to_data) for deed in (flip, fall_silent) for to_data in (True, False)]


@pytest.mark.parametrize(("deed", "to_data"), slow_after(1, ROWS))
def test_a_deed_is_an_error_that_names_the_peer(
    hosts: list[str], deed: Deed, to_data: bool
) -> None:
    outcomes = run_on_hosts(disturbed, hosts, [0, 1], deed, to_data, env=ENV, initialized=False)
    for rank, (kind, text) in enumerate(outcomes):
        assert kind in ("PeerLostError", "RingError", "TimeoutError"), text
        assert f"rank {1 - rank} (10." in text, text
        assert "allreduce 'values'" in text or "this world has ended" in text, text


def fork_and_go_on() -> None:
    put_on_the_way()
    hvd.init()
    work()
    for ends in (os._exit, lambda _: os.kill(os.getpid(), signal.SIGKILL)):
        if (pid := os.fork()) == 0:
            ends(0)
        work()
        os.waitpid(pid, 0)
        work()


@pytest.mark.slow
def test_a_child_has_no_effect(hosts: list[str]) -> None:
    run_on_hosts(fork_and_go_on, hosts, [0, 1], env=ENV, initialized=False)
