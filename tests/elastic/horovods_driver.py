"""A stand-in for Horovod's elastic driver: its HTTP store, and its client of notifications.

Written from the protocol: Horovod itself is not installed here.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import pickle
import socket
import struct
import sys
import threading
import types
from enum import IntFlag
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE_S = 60.0


class HostUpdateResult(IntFlag):
    removed = 1
    added = 2


class HostsUpdatedRequest:
    def __init__(self, timestamp: float, res: HostUpdateResult) -> None:
        self.timestamp, self.res = timestamp, res


class PingRequest:
    pass


class PingResponse:
    pass


class AckResponse:
    pass


def _lend_names() -> None:
    """Let the classes above be pickled as those of Horovod."""
    for name, classes in (
        ("horovod.runner.elastic.worker", (HostUpdateResult, HostsUpdatedRequest)),
        ("horovod.runner.common.util.network", (PingRequest, PingResponse, AckResponse)),
    ):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            part = ".".join(parts[:end])
            sys.modules.setdefault(part, types.ModuleType(part))
        for each in classes:
            each.__module__ = name
            setattr(sys.modules[name], each.__name__, each)


_lend_names()


class Driver:
    """Waits until all workers have asked for their ranks, and makes the next world of them.

    Args:
        workers: that live, by the driver's names.

    Attributes:
        order: the workers of the next world, by rank; others are to leave.
        living: those that must have asked before a world is made.
        worlds: of which workers the worlds were.
        addresses: where workers listen for notifications, and their keys.
    """

    def __init__(self, workers: list[str]) -> None:
        self.order, self.living = list(workers), set(workers)
        self.worlds: list[list[str]] = []
        self.addresses: dict[str, tuple[dict[str, list[tuple[str, int]]], bytes]] = {}
        self.on_put: dict[str, Any] = {}  # scope -> function of the key
        self._asked: set[str] = set()
        self._store: dict[str, bytes] = {}
        self._changed = threading.Condition()
        driver = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _, scope, key = self.path.split("/")
                if scope == "rank_and_size":
                    self.reply(driver._place_of(key))
                else:
                    self.reply(driver._store.get(self.path))

            def do_PUT(self) -> None:
                _, scope, key = self.path.split("/")
                driver._put(scope, key, self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(b"")

            def reply(self, value: bytes | None) -> None:
                self.send_response(404 if value is None else 200)
                self.send_header("Content-Length", str(len(value or b"")))
                self.end_headers()
                self.wfile.write(value or b"")

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def lose(self, worker: str) -> None:
        """The process of a worker has ended."""
        with self._changed:
            self.living.discard(worker)
            self.order = [each for each in self.order if each != worker]
            self._changed.notify_all()

    def notify(self, worker: str, request: Any) -> Any:
        """Send a worker's service a request, as Horovod's client does; return the answer."""
        addresses, key = self.addresses[worker]
        ((address,),) = addresses.values()
        return send(address, key, request)

    def _put(self, scope: str, key: str, value: bytes) -> None:
        if scope == "worker_addresses":
            self.addresses[key] = pickle.loads(base64.b64decode(value))
        elif scope in self.on_put:
            self.on_put[scope](key)
        else:
            self._store[f"/{scope}/{key}"] = value

    def _place_of(self, worker: str) -> bytes:
        with self._changed:
            self._asked.add(worker)
            world = len(self.worlds)
            self._changed.notify_all()
            while len(self.worlds) == world:
                if self.living <= self._asked:
                    self._asked.clear()
                    self._store.clear()
                    self.worlds.append(list(self.order))
                    self._changed.notify_all()
                elif not self._changed.wait(PATIENCE_S):
                    return b"never"
            made = self.worlds[world]
        if worker not in made:
            return b"-1,-1,-1,-1,-1,-1"
        rank, size = made.index(worker), len(made)
        return f"{rank},{size},{rank},{size},0,1".encode()


def send(address: tuple[str, int], key: bytes, request: Any) -> Any:
    """Send a request to a service, and return its answer."""
    message = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
    with socket.create_connection(address, PATIENCE_S) as connection:
        code = hmac.new(key, message, hashlib.sha256).digest()
        connection.sendall(code + struct.pack("i", len(message)) + message)
        file = connection.makefile("rb")
        code, length = file.read(32), file.read(4)
        if not length:
            raise ConnectionError("no answer")
        answer = file.read(struct.unpack("i", length)[0])
    assert hmac.compare_digest(code, hmac.new(key, answer, hashlib.sha256).digest())
    return pickle.loads(answer)
