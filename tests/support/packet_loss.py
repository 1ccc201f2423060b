# SPDX-License-Identifier: Apache-2.0
"""losing_packets: an interface that drops a random share of arriving packets. Needs root.

It uses an XDP program (Linux 5.9), which needs no kernel module and no other tool.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

# linux/bpf.h
_PROG_LOAD, _LINK_CREATE = 5, 28
_PROG_TYPE_XDP, _ATTACH_XDP = 6, 37
_XDP_DROP, _XDP_PASS = 1, 2
_XDP_FLAGS_SKB_MODE = 2  # linux/if_link.h: any interface can do that
_GET_PRANDOM_U32 = 7
_SYSCALLS = {"x86_64": 321, "aarch64": 280}


@contextlib.contextmanager
def losing_packets(interface: str, share: float) -> Iterator[None]:
    """Drop a share of the packets that arrive at an interface of this network namespace.

    Raises:
        OSError: the kernel does not support it, or this process has no permission.
    """
    program = _load(_dropping(share))
    try:
        index = socket.if_nametoindex(interface)
        link = _bpf(
            _LINK_CREATE, struct.pack("<4I", program, index, _ATTACH_XDP, _XDP_FLAGS_SKB_MODE)
        )
    finally:
        os.close(program)
    try:
        yield
    finally:
        os.close(link)  # detaches the program


def _dropping(share: float) -> bytes:
    """Return: r0 = random; r1 = r0; r2 = bound; r0 = DROP; if r1 < r2: exit; r0 = PASS; exit."""
    return b"".join(
        (
            _instruction(0x85, 0, 0, 0, _GET_PRANDOM_U32),
            _instruction(0xBC, 1, 0, 0, 0),
            _instruction(0xB4, 2, 0, 0, int(share * ((1 << 32) - 1))),
            _instruction(0xB7, 0, 0, 0, _XDP_DROP),
            _instruction(0xAD, 1, 2, 1, 0),
            _instruction(0xB7, 0, 0, 0, _XDP_PASS),
            _instruction(0x95, 0, 0, 0, 0),
        )
    )


def _instruction(code: int, target: int, source: int, offset: int, value: int) -> bytes:
    return struct.pack("<BBhI", code, target | source << 4, offset, value)


def _load(code: bytes) -> int:
    instructions = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"GPL")
    addresses = ctypes.addressof(instructions), ctypes.addressof(licence)
    return _bpf(_PROG_LOAD, struct.pack("<IIQQ", _PROG_TYPE_XDP, len(code) // 8, *addresses))


def _bpf(command: int, attributes: bytes) -> int:
    number = _SYSCALLS.get(os.uname().machine)
    if number is None:
        raise OSError(f"no number of bpf() is known for {os.uname().machine}")
    buffer = ctypes.create_string_buffer(attributes, 128)
    result = ctypes.CDLL(None, use_errno=True).syscall(number, command, buffer, len(buffer))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"bpf({command}): {os.strerror(error)}")
    return int(result)
