# SPDX-License-Identifier: Apache-2.0
"""Free ports below the ephemeral range, so that they stay free until a test uses them."""

import itertools
import os
import socket

_FIRST, _COUNT = 12_000, 16_000  # below the kernel's default ephemeral range
_turns = itertools.count()


def free_port() -> int:
    """Return a port of this host that is free now."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of some neighbouring ports that are free for now.

    Another call, also in another process, begins elsewhere.
    """
    while True:
        first = _FIRST + (997 * os.getpid() + 16 * next(_turns)) % (_COUNT - count)
        if all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
