"""Free ports."""

import socket


def free_port() -> int:
    """Return a port of this host that is free for now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def free_ports(count: int) -> int:
    """Return the first of some neighbouring ports that are free for now."""
    while True:
        first = free_port()
        if first + count <= 1 << 16 and all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
