"""Host, parse_hosts, read_hostfile, ...: hosts and their slots, as users write them."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch_ring.errors import InvalidArgumentError

__all__ = [
    "Host",
    "is_this_host",
    "parse_host_lines",
    "parse_hosts",
    "parse_slots",
    "read_hostfile",
]

_NAME = re.compile(r"(?:[\w.-]+@)?[\w.:%-]+")
_EXAMPLE = "write host1:4,host2:4"
_IN_A_FILE = "give a file with lines such as `host1 slots=4`"


@dataclass(frozen=True)
class Host:
    """A host, as ssh knows it, and the number of ranks that it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of "host1:4,host2:4"; one without a number has one slot.

    An IPv6 address stands in brackets, as in "[fd00::1]:4". A host that is named twice has the sum
    of its slots.

    Raises:
        InvalidArgumentError: the text is something else.
    """
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\[[^\]]+\]|[^:\s]+)(?::(\d+))?\s*", item)
        if match is None:
            raise InvalidArgumentError(f"-H {text!r}: {item!r} is not a host and slots: {_EXAMPLE}")
        found.append(_host(match[1].strip("[]"), match[2] or "1", f"-H {text!r}"))
    return _merged(found)


def read_hostfile(path: str) -> list[Host]:
    """Return the hosts of a file with a line "host slots=4" or "host:4" for each.

    A line may also have a name alone, which counts as one slot each time that it comes. What
    follows a "#" is a comment; other words on a line are those of Open MPI, and say nothing here.

    Raises:
        InvalidArgumentError: there is no such file, or it has another line, or none.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"the host file {path!r} cannot be read: {error}: {_IN_A_FILE}"
        ) from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"line {number} of the host file {path!r}"
        slots = next((word[6:] for word in words[1:] if word.startswith("slots=")), None)
        name, _, after_colon = words[0].partition(":")
        if words[0].count(":") > 1:  # an IPv6 address
            name, after_colon = words[0].strip("[]"), ""
        found.append(_host(name, slots or after_colon or "1", where))
    if not found:
        raise InvalidArgumentError(f"the host file {path!r} names no host: {_IN_A_FILE}")
    return _merged(found)


def parse_host_lines(text: str, slots: int) -> list[Host]:
    """Return the hosts of lines "host" or "host:4", as a script prints them.

    Args:
        text: the lines; empty ones say nothing.
        slots: of a host without a number.

    Raises:
        InvalidArgumentError: a line is something else.
    """
    found = []
    for line in text.splitlines():
        if line.strip():
            match = re.fullmatch(r"\s*(\[[^\]]+\]|[^:\s]+)(?::(\d+))?\s*", line)
            if match is None:
                raise InvalidArgumentError(f"{line!r} is not a host, as in host1:4")
            found.append(_host(match[1].strip("[]"), match[2] or str(slots), f"{line!r}"))
    return _merged(found)


def parse_slots(hosts: str | Iterable[Host]) -> list[Host]:
    """Return hosts that are a text or hosts already."""
    return parse_hosts(hosts) if isinstance(hosts, str) else _merged(hosts)


def is_this_host(name: str) -> bool:
    """Return whether a host name means the host that this process is on.

    A name that cannot be resolved means another host: ssh may know it.
    """
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            # Only an address of this host can be bound. Not with a user's name before it.
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def _host(name: str, slots: str, where: str) -> Host:
    if not _NAME.fullmatch(name) or name.startswith("-"):  # "-o..." would be an option of ssh
        raise InvalidArgumentError(f"{where}: {name!r} is not the name of a host: {_EXAMPLE}")
    if not slots.isdecimal() or int(slots) < 1:
        raise InvalidArgumentError(f"{where}: {slots!r} slots: must be a whole number, 1 or more")
    return Host(name, int(slots))


def _merged(hosts: Iterable[Host]) -> list[Host]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]
