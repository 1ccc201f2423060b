"""Hosts on one machine: network namespaces that veth pairs join to a bridge. Needs root."""

from __future__ import annotations

import ctypes
import os
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
    """A network namespace with one interface, eth0."""

    namespace: str
    address: str
    switch: str = ""  # the namespace of the bridge, and the host's port there
    port: str = ""

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs another one in this namespace."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def cut_off(self) -> None:
        """Take its cable out of the bridge: nothing that is sent to it or by it arrives."""
        run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def enter(self) -> None:
        """Move the calling thread into this namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(NAMED / self.namespace) as file:
            if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns({self.namespace})")


def run(*arguments: str) -> None:
    """Run a command; if it fails, the exception has its output."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def hosts(
    count: int, rate: str | None = None, window: int | None = None
) -> Iterator[Sequence[Host]]:
    """Make hosts that see each other, and remove them afterwards.

    Args:
        rate: each host's limit for sending, in tc's notation ("1gbit"); None: no limit.
        window: most bytes of a socket's buffers, which bound a connection's bytes in flight;
            None: the kernel's default.

    Raises:
        OSError: there is no `ip` or `tc`, or no right to use them.
    """
    unique = f"bench{os.getpid()}"
    switch = f"{unique}s"
    made: list[str] = []
    found = [Host(f"{unique}h{i}", f"{NETWORK}.{i + 1}", switch, f"port{i}") for i in range(count)]
    try:
        for name in (switch, *(host.namespace for host in found)):
            made.append(name)  # before: Ctrl-C may come between
            run("ip", "netns", "add", name)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in found:
            ip = ("ip", "-n", host.namespace)
            pair = ("type", "veth", "peer", host.port, "netns", switch)
            run(*ip, "link", "add", "eth0", *pair)
            run(*ip, "addr", "add", f"{host.address}/24", "dev", "eth0")
            run(*ip, "link", "set", "eth0", "up")
            run(*ip, "link", "set", "lo", "up")
            run("ip", "-n", switch, "link", "set", host.port, "master", "bridge", "up")
            if window:
                sizes = f"{min(window, 4096)} {window} {window}"
                for name in ("tcp_rmem", "tcp_wmem"):
                    run(*host.command("sysctl", "-w", f"net.ipv4.{name}={sizes}"))
            if rate:
                # A token bucket of 1 ms at 1 Gbit/s, and a queue of 50 ms.
                tbf = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
                run("tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", *tbf)
        yield found
    finally:
        for name in made:
            if (NAMED / name).exists():
                run("ip", "netns", "del", name)
