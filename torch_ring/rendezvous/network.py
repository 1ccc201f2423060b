"""own_address, receive_fds, ...: this host's addresses; credentials and descriptors of peers."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from torch_ring.errors import InvalidArgumentError

__all__ = [
    "ForeignUserError",
    "address_of_interface",
    "has_loopback",
    "is_loopback",
    "is_loopback_name",
    "own_address",
    "receive_fds",
    "require_same_user",
]

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913  # linux/sockios.h
_IFF_UP = 1  # linux/if.h
_ELSEWHERE = "192.0.2.1"  # a documentation address: reached by the default route, or not at all


class ForeignUserError(PermissionError):
    """The peer of a Unix socket is a process of `user`, who is another one than this process's."""

    def __init__(self, text: str, user: int) -> None:
        super().__init__(text)
        self.user = user


def own_address(interface: str, towards: str | None, *, one_host: bool = False) -> str:
    """Return the address of this host at which the other ranks find it.

    Args:
        interface: TORCH_RING_INTERFACE, which decides if it is not empty.
        towards: the store's host, if known: the route to it leads to the other ranks, too.
        one_host: whether all ranks are on this host.
    """
    if interface:
        return address_of_interface(interface)
    if towards is not None:
        with contextlib.suppress(OSError):  # its name may come later, or the way to it
            address = _source_address(towards)
            # Many hosts resolve their own name to a loopback address, where no other finds them.
            if one_host or is_loopback_name(towards) or not is_loopback(address):
                return address
    if not (towards and is_loopback_name(towards)):
        with contextlib.suppress(OSError):  # there is no default route
            return _source_address(_ELSEWHERE)
        for interface in _interfaces_up():
            with contextlib.suppress(InvalidArgumentError):  # it has no address
                if not is_loopback(address := address_of_interface(interface)):
                    return address
    return "127.0.0.1"  # this host is its own network


def has_loopback() -> bool:
    """Return whether this host's loopback interface is up."""
    return "lo" in _interfaces_up()


def _interfaces_up() -> list[str]:
    """Return the names of the network interfaces that are up, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has just gone
                answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("256s", name.encode()))
                if struct.unpack("=16xH", answer[:18])[0] & _IFF_UP:
                    found.append(name)
    return found


def address_of_interface(interface: str) -> str:
    """Return the address of a network interface, given by name or by that address.

    Raises:
        InvalidArgumentError: there is no such interface, or it has no address.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
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
    """Return the process that is the peer of a Unix socket; 0: of another PID namespace.

    Raises:
        ForeignUserError: it is a process of another user.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise ForeignUserError(f"the peer is a process of user {user}", user)
    return int(pid)


def receive_fds(connection: socket.socket, count: int) -> list[int]:
    """Receive one byte and the descriptors that come with it, `count` at most.

    Child processes do not inherit the descriptors; socket.recv_fds() ignores the flag for that.
    """
    received = array.array("i")
    _, ancillary, _, _ = connection.recvmsg(
        1, socket.CMSG_LEN(count * received.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    return list(received)


def is_loopback(address: str) -> bool:
    """Return whether an address is one by which a host reaches only itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_loopback_name(host: str) -> bool:
    """Return whether `host` means the loopback interface on every host that resolves it."""
    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:
        return False


def _source_address(host: str) -> str:
    """Return the address from which packets to `host` would leave; none is sent."""
    # Bytes, because for text the first look-up of a process loads the tables of Unicode names.
    name = host.encode() if host.isascii() else host
    family, kind, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
