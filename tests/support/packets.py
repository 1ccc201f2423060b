# SPDX-License-Identifier: Apache-2.0
"""packets: all that crosses the loopback interface, as a stranger on the way sees it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import pytest

__all__ = ["needs_packets", "packets", "with_ports"]

needs_packets = pytest.mark.skipif(os.geteuid() != 0, reason="only root sees all packets")
_HEADERS = slice(14, 34)  # Ethernet's is 14 bytes long, IPv4's 20


@contextmanager
def packets() -> Iterator[list[bytes]]:
    """Collect the packets of the loopback interface."""
    seen: list[bytes] = []
    done = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sniffer:
        sniffer.bind(("lo", 0))
        sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        sniffer.settimeout(0.1)

        def collect() -> None:
            while True:  # also those that wait in the socket at the end
                try:
                    seen.append(sniffer.recv(1 << 17))
                except TimeoutError:
                    if done.is_set():
                        return

        thread = threading.Thread(target=collect)
        thread.start()
        try:
            yield seen
        finally:
            done.set()
            thread.join()


def with_ports(seen: Sequence[bytes], ports: Collection[int]) -> bytes:
    """Return the data of the packets of IPv4 and TCP that come from or go to one of the ports."""
    data = b""
    for packet in seen:
        ip, tcp = packet[_HEADERS], packet[_HEADERS.stop :]
        if ip[:1] != b"\x45" or ip[9] != socket.IPPROTO_TCP or len(tcp) < 20:
            continue
        ends = int.from_bytes(tcp[:2], "big"), int.from_bytes(tcp[2:4], "big")
        if not set(ends).isdisjoint(ports):
            data += tcp[4 * (tcp[12] >> 4) :]
    return data
