"""frame, Frames: how requests to an agent and its events travel over a pipe.

The text of this file is sent to every host: it uses the standard library only.
"""

from __future__ import annotations

import json
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["GREETING", "Frames", "frame"]

GREETING = b"\0torch_ring agent\n"  # what a shell prints before it is no frame

_LENGTHS = struct.Struct("!II")  # bytes of a frame's header, which is JSON, and of its payload


def frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return a header and a payload as they travel."""
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class Frames:
    """Cuts bytes, as they come, into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Take bytes; return the header and the payload of each frame that is whole now."""
        self._bytes += data
        while len(self._bytes) >= _LENGTHS.size:
            text, payload = _LENGTHS.unpack_from(self._bytes)
            end = _LENGTHS.size + text + payload
            if len(self._bytes) < end:
                return
            whole = bytes(self._bytes[:end])
            del self._bytes[:end]
            yield json.loads(whole[_LENGTHS.size : end - payload]), whole[end - payload :]
