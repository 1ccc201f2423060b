# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: network namespaces that veth pairs join to a bridge. Need root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.214.88"
NAMED = Path("/run/netns")  # where `ip netns add` makes namespaces
CLONE_NEWNET = 0x40000000  # linux/sched.h


@dataclass(frozen=True)
class Host:
    """A network namespace with interfaces eth0, eth1, ..., each in a network of its own."""

    namespace: str  # empty: this process's own, with the loopback interface
    addresses: tuple[str, ...]  # of each interface
    switch: str = ""  # the namespace of the bridges, and the host's ports there
    ports: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The address of eth0."""
        return self.addresses[0]

    @property
    def interfaces(self) -> list[str]:
        """The names of the interfaces."""
        if not self.namespace:
            return ["lo"]
        return [f"eth{i}" for i in range(len(self.addresses))]

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs another one in this namespace."""
        enter = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        return [*enter, *arguments]

    def cut_off(self) -> None:
        """Take its cables out of the bridges: no packet to or from the host arrives any more."""
        for port in self.ports:
            run("ip", "-n", self.switch, "link", "set", port, "down")

    def enter(self) -> None:
        """Move the calling thread into this namespace."""
        if not self.namespace:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        with open(NAMED / self.namespace) as file:
            if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns({self.namespace})")


HERE = Host("", ("127.0.0.1",))


def free_port() -> int:
    """Return a free port below those that the kernel gives to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def why_none() -> str | None:
    """Return the reason for which there are no namespaces here, if any."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts(1):
            return None
    except OSError as error:  # no `ip`, or a container without the right
        return str(error)


def run(*arguments: str) -> None:
    """Run a command; if it fails, the exception has its output."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def hosts(
    count: int, rate: str | None = None, window: int | None = None, interfaces: int = 1
) -> Iterator[Sequence[Host]]:
    """Make hosts that see each other, and remove them afterwards.

    Args:
        rate: each interface's limit for sending, in tc's notation ("1gbit"); None: no limit.
        window: most bytes of a socket's buffers, which bound a connection's bytes in flight;
            None: the kernel's default.
        interfaces: the number of interfaces of each host.

    Raises:
        OSError: there is no `ip` or `tc`, or no right to use them.
    """
    unique = f"bench{os.getpid()}"
    switch = f"{unique}s"
    made: list[str] = []
    first, _, third = NETWORK.rpartition(".")
    networks = [f"{first}.{int(third) + k}" for k in range(interfaces)]
    found = [
        Host(
            f"{unique}h{i}",
            tuple(f"{network}.{i + 1}" for network in networks),
            switch,
            tuple(f"port{i}.{k}" for k in range(interfaces)),
        )
        for i in range(count)
    ]
    try:
        for name in (switch, *(host.namespace for host in found)):
            made.append(name)  # before: Ctrl-C may come between
            if (NAMED / name).exists():  # of a killed process that had this one's number
                run("ip", "netns", "del", name)
            run("ip", "netns", "add", name)
        for k in range(interfaces):
            run("ip", "-n", switch, "link", "add", f"bridge{k}", "type", "bridge")
            run("ip", "-n", switch, "link", "set", f"bridge{k}", "up")
        for host in found:
            ip = ("ip", "-n", host.namespace)
            run(*ip, "link", "set", "lo", "up")
            for k, (name, address) in enumerate(zip(host.interfaces, host.addresses, strict=True)):
                pair = ("type", "veth", "peer", host.ports[k], "netns", switch)
                run(*ip, "link", "add", name, *pair)
                run(*ip, "addr", "add", f"{address}/24", "dev", name)
                run(*ip, "link", "set", name, "up")
                run("ip", "-n", switch, "link", "set", host.ports[k], "master", f"bridge{k}", "up")
                if rate:
                    # A token bucket of 1 ms at 1 Gbit/s, and a queue of 50 ms.
                    tbf = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
                    run("tc", "-n", host.namespace, "qdisc", "add", "dev", name, *tbf)
            if window:
                sizes = f"{min(window, 4096)} {window} {window}"
                for name in ("tcp_rmem", "tcp_wmem"):
                    run(*host.command("sysctl", "-w", f"net.ipv4.{name}={sizes}"))
        yield found
    finally:
        for name in made:
            if (NAMED / name).exists():
                run("ip", "netns", "del", name)
