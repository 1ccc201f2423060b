"""HorovodNotices: where Horovod's elastic driver tells a worker that hosts have come or gone.

A message is an HMAC-SHA256, four bytes of length in the host's order, and a pickle. Of that only
the few classes are taken that the driver sends, and only after the code was checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import os
import pickle
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from typing import Any

from torch_ring.rendezvous.inherited import close_in_child

__all__ = ["HorovodNotices"]

_KEY_BYTES = _CODE_BYTES = 32
_MOST_BYTES = 1 << 20
_PATIENCE_S = 20.0  # for a message that has begun; the driver's own for an answer
_LENGTH = struct.Struct("=i")
_NETWORK, _WORKER = "horovod.runner.common.util.network", "horovod.runner.elastic.worker"
_SERVICE = "worker notification service"  # by which the driver knows that it is one


class _Ping:
    """The driver asks whether this is the service that it looks for."""


class _HostsUpdated:
    """Hosts have come or gone: at `timestamp`, and `res` of Horovod's HostUpdateResult."""

    timestamp: Any = 0
    res: int = 0


# Of HostUpdateResult.
_RESULTS = {"no_update": 0, "removed": 1, "added": 2, "mixed": 3}


def _member(flags: object, name: object) -> int:
    if flags is not int or name not in _RESULTS:
        raise pickle.UnpicklingError(f"{name!r} is no result of the driver")
    return _RESULTS[str(name)]


def _union(one: object, other: object) -> int:
    if not (type(one) is type(other) is int):
        raise pickle.UnpicklingError("no result of the driver")
    return one | other


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            (_NETWORK, "PingRequest"): _Ping,
            (_WORKER, "HostsUpdatedRequest"): _HostsUpdated,
            (_WORKER, "HostUpdateResult"): int,
            # As Python 3.11.0 to 3.11.3 pickle a flag, such as Debian 12's:
            ("builtins", "getattr"): _member,
            ("_operator", "or_"): _union,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name} is no message of the driver")
        return known[module, name]


class HorovodNotices:
    """A service in a thread of its own.

    Thread: close() any. Blocking: no.

    Args:
        host: the address to listen at.
        on_hosts_updated: called with the driver's timestamp and result. Thread: any.

    Attributes:
        port: where it listens.
        key: with which the driver proves who it is.
    """

    def __init__(self, host: str, on_hosts_updated: Callable[[Any, int], None]) -> None:
        self.key = os.urandom(_KEY_BYTES)
        self._on_hosts_updated = on_hosts_updated
        notices = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = _PATIENCE_S

            def handle(self) -> None:
                with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError, struct.error):
                    message = notices._read(self.rfile)
                    self.wfile.write(notices._packed(notices._answer(message, self.client_address)))

        class Service(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        self._server = Service((host, 0), Handler)
        close_in_child(self._server.socket)
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, name="torch_ring notices", daemon=True
        ).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, message: Any, caller: Any) -> bytes:
        if isinstance(message, _HostsUpdated):
            self._on_hosts_updated(message.timestamp, int(message.res))
            return _pickled("AckResponse", {})
        if isinstance(message, _Ping):
            source = {"service_name": _SERVICE, "source_address": caller[0]}
            return _pickled("PingResponse", source)
        raise pickle.UnpicklingError("no request")

    def _read(self, file: Any) -> Any:
        code, length = file.read(_CODE_BYTES), file.read(_LENGTH.size)
        (count,) = _LENGTH.unpack(length)
        if not 0 <= count <= _MOST_BYTES:
            raise pickle.UnpicklingError("no message of the driver")
        message = file.read(count)
        if not hmac.compare_digest(code, self._code(message)):
            raise pickle.UnpicklingError("not from the driver")
        return _Unpickler(io.BytesIO(message)).load()

    def _packed(self, message: bytes) -> bytes:
        return self._code(message) + _LENGTH.pack(len(message)) + message

    def _code(self, message: bytes) -> bytes:
        return hmac.new(self.key, message, hashlib.sha256).digest()


def _pickled(name: str, state: dict[str, str]) -> bytes:
    """Return the pickle of an instance of a class of Horovod, which is not installed here."""
    end = b"." if not state else pickle.dumps(state, 2)[2:-1] + b"b."
    return b"\x80\x02c" + f"{_NETWORK}\n{name}\n".encode() + b")\x81" + end
