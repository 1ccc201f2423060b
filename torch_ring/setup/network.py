# SPDX-License-Identifier: Apache-2.0
"""Deadline, own_address, close_in_child: basic tools of the set-up.

Deadlines; this host's addresses; credentials and descriptors of peers. If another thread forks in
the middle of init(), the child must close its parent's connections: as long as it holds them, no
other rank notices the parent's death.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakSet

from torch_ring.errors import InvalidArgumentError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "BACKLOG",
    "Deadline",
    "ForeignUserError",
    "address_of_interface",
    "at_fork",
    "close_all_in_child",
    "close_in_child",
    "is_loopback",
    "is_loopback_name",
    "lack_of_loopback",
    "listen_unix",
    "own_address",
    "own_addresses",
    "own_loopback",
    "pauses",
    "require_same_user",
]

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913  # linux/sockios.h
_IFF_UP = 1  # linux/if.h
BACKLOG = 4096  # the kernel's limit, /proc/sys/net/core/somaxconn, is usually lower
_ELSEWHERE = "192.0.2.1"  # a documentation address: only the default route leads there


class ForeignUserError(PermissionError):
    """The peer of a Unix socket is a process of another user, `user`."""

    def __init__(self, text: str, user: int) -> None:
        super().__init__(text)
        self.user = user


def own_addresses(interfaces: str, towards: str | None, *, one_host: bool = False) -> list[str]:
    """Return the addresses at which the other ranks reach this host, one for each interface.

    Args:
        interfaces: TORCH_RING_INTERFACE, which takes precedence if it is not empty.
        towards: the store's host, if known: the route to it leads to the other ranks, too.
        one_host: whether all ranks are on this host.

    Raises:
        InvalidArgumentError: one of the interfaces cannot be used, or two of them have one address.
    """
    if not interfaces:
        return [_address_by_route(towards, one_host)]
    names: dict[str, str] = {}  # by address
    for name in interfaces.split(","):
        other = names.setdefault(address := address_of_interface(name), name)
        if other is not name:
            raise InvalidArgumentError(
                f"TORCH_RING_INTERFACE={interfaces!r}: {other} and {name} have the same address, "
                f"{address}: name each interface once"
            )
    return list(names)


def own_address(interfaces: str, towards: str | None, *, one_host: bool = False) -> str:
    """Return the first of the addresses, for uses with a single interface.

    Args:
        interfaces: TORCH_RING_INTERFACE.
        towards: the store's host, if known.
        one_host: whether all ranks are on this host.

    Raises:
        InvalidArgumentError: the first interface cannot be used.
    """
    return own_addresses(interfaces.partition(",")[0], towards, one_host=one_host)[0]


def own_loopback() -> str:
    """Return the address at which the processes of this host alone reach one another."""
    return own_address("", "127.0.0.1", one_host=True)


def _address_by_route(towards: str | None, one_host: bool) -> str:
    if towards is not None:
        with contextlib.suppress(OSError):  # its name, or a route to it, may appear later
            address = _source_address(towards)
            # Many hosts resolve their own name to a loopback address, which others cannot reach.
            if one_host or is_loopback_name(towards) or not is_loopback(address):
                return address
    if not (towards and is_loopback_name(towards)):
        with contextlib.suppress(OSError):  # there is no default route
            return _source_address(_ELSEWHERE)
        for interface in _interfaces_up():
            with contextlib.suppress(InvalidArgumentError):  # it has no address
                if not is_loopback(address := address_of_interface(interface)):
                    return address
    with contextlib.suppress(InvalidArgumentError):  # it is down, or has no address
        return address_of_interface("lo")  # there is no other network; ::1 without IPv4
    return "127.0.0.1"


def lack_of_loopback() -> str | None:
    """Return what this host's loopback interface lacks, and the command for it; None: nothing."""
    if "lo" not in _interfaces_up():
        return "no loopback interface that is up: `ip link set lo up`"
    try:
        address_of_interface("lo")
    except InvalidArgumentError:
        return "no loopback interface with an address: `ip addr add 127.0.0.1/8 dev lo`"
    return None


def _interfaces_up() -> list[str]:
    """Return the names of the network interfaces that are up, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has just been removed
                if _is_up(probe, name):
                    found.append(name)
    return found


def _is_up(probe: socket.socket, interface: str) -> bool:
    """Return whether an interface is up, asking on any socket. Raises OSError: there is none."""
    answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("256s", interface.encode()[:15]))
    return bool(struct.unpack("=16xH", answer[:18])[0] & _IFF_UP)


def address_of_interface(interface: str) -> str:
    """Return the address of a network interface, given by name or by that address.

    Raises:
        InvalidArgumentError: there is no such interface, or it has no address, or is down.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            if not _is_up(probe, interface):
                raise InvalidArgumentError(
                    f"TORCH_RING_INTERFACE={interface!r}: it is down: `ip link set {interface} up`"
                )
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass
    for line in _ipv6_addresses():
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope in ("00", "10"):  # global, or the loopback's
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise InvalidArgumentError(
        f"TORCH_RING_INTERFACE={interface!r}: must be an address of this host, or an interface "
        f"that has one ({names})"
    )


def _ipv6_addresses() -> list[str]:
    try:
        return Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return []


def require_same_user(connection: socket.socket) -> int:
    """Return the pid of a Unix socket's peer; 0: it is in another PID namespace.

    Raises:
        ForeignUserError: the peer is a process of another user.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise ForeignUserError(f"the peer is a process of user {user}", user)
    return int(pid)


def listen_unix(name: str) -> socket.socket:
    """Listen at the abstract Unix socket `name`. Raises OSError if it is taken."""
    listener = close_in_child(socket.socket(socket.AF_UNIX))
    try:
        listener.bind(name)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, at which a host reaches only itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_loopback_name(host: str) -> bool:
    """Return whether `host` means the loopback interface on every host that resolves it."""
    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:
        return False


def _source_address(host: str) -> str:
    """Return the source address of packets to `host`, without sending any."""
    # Bytes: for text, the first look-up of a process would load tables of Unicode names.
    name = host.encode() if host.isascii() else host
    family, kind, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class Deadline:
    """The point in time at which init(), or the making of a process set, gives up.

    Args:
        timeout_s: seconds from now.
        name: the name of the setting with the timeout.
        call: the call of the program that gives up then, for errors.

    Attributes:
        timeout_s, call: as the arguments.
    """

    def __init__(
        self, timeout_s: float, name: str = "TORCH_RING_INIT_TIMEOUT", call: str = "init()"
    ) -> None:
        self.timeout_s, self._name, self.call = timeout_s, name, call
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the remaining seconds, 0 or more."""
        return max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return self.left_s() == 0.0

    def end(self) -> None:
        """Make the deadline pass now. Thread: any."""
        self._at = -math.inf

    def __str__(self) -> str:
        return f"within {self.timeout_s:g} s ({self._name})"


def pauses(deadline: Deadline, size: int) -> Iterator[None]:
    """Yield until the deadline, and sleep in between: little at first, then longer.

    Args:
        deadline: when to end.
        size: the number of ranks that may share a processor, and poll at the same rate.
    """
    pause_s, longest_s = 0.0005, 0.005 + 1e-4 * size
    while not deadline.passed():
        yield
        time.sleep(min(pause_s, deadline.left_s()))
        pause_s = min(1.5 * pause_s, longest_s)


class Closable(Protocol):
    def close(self) -> None:
        """Close the descriptor. Does nothing the second time."""


at_fork: Callable[..., None] = getattr(os, "register_at_fork", lambda **_: None)
"""os.register_at_fork(). On Windows, where no process forks, it does nothing."""

Made = TypeVar("Made", bound=Closable)

_made: WeakSet[Closable] = WeakSet()


def close_in_child(made: Made) -> Made:
    """Return `made`, a socket or a file, whose copy is closed in forked children."""
    _made.add(made)
    return made


def close_all_in_child() -> None:
    """Close all objects that `close_in_child` has registered. Call in a forked child."""
    for made in list(_made):
        with contextlib.suppress(OSError):
            made.close()
    _made.clear()
