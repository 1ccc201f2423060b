"""HorovodDriver: the driver of ``horovodrun`` for elastic jobs, as one of its workers sees it."""

from __future__ import annotations

import base64
import builtins
import contextlib
import http.client
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

from torch_ring.errors import InvalidArgumentError, RingError, TimeoutError

__all__ = ["HorovodDriver", "Placement", "horovod_driver"]

_ANSWER_S = 30.0  # of requests that need not wait for other workers
_VARIABLES = ("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_HOSTNAME", "HOROVOD_LOCAL_RANK")


@dataclass(frozen=True)
class Placement:
    """What the driver makes of a worker; ranks are 0-based, sizes are numbers of workers."""

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class HorovodDriver:
    """The key-value store of the driver, over HTTP: ``PUT`` and ``GET`` of ``/scope/key``.

    Thread: any. Blocking: for the seconds that are given. Errors: RingError, if the driver is gone.

    Attributes:
        address, port: where it listens.
        worker: "host:local rank", as the driver calls this process.
    """

    address: str
    port: int
    worker: str

    def placement(self, timeout_s: float) -> Placement | None:
        """Return this process's place in the next world; None: it is to leave the job.

        Waits until all workers have asked. The driver forgets the keys of the world before, then.

        Raises:
            TimeoutError: some have not.
            RingError: the driver is gone, or says something else.
        """
        text = self._request("GET", f"/rank_and_size/{self.worker}", timeout_s)
        numbers: list[int] = []
        with contextlib.suppress(ValueError):
            numbers = [int(number) for number in (text or b"").split(b",")]
        if len(numbers) != 6:
            raise RingError(f"{self}: {text!r} are no ranks and sizes")
        return Placement(*numbers[:4]) if numbers[0] >= 0 else None

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Store a value."""
        self._request("PUT", f"/{scope}/{key}", _ANSWER_S, value)

    def get(self, scope: str, key: str) -> bytes | None:
        """Return a value; None: there is none yet."""
        return self._request("GET", f"/{scope}/{key}", _ANSWER_S)

    def register(self, host: str, port: int, key: bytes) -> None:
        """Tell where this process hears of changes of the hosts, and with which key."""
        value = ({"torch_ring": [(host, port)]}, key)
        self.put("worker_addresses", self.worker, base64.b64encode(pickle.dumps(value)))

    def __str__(self) -> str:
        return f"Horovod's driver at {self.address}:{self.port}"

    def _request(
        self, method: str, path: str, timeout_s: float, body: bytes | None = None
    ) -> bytes | None:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            data = answer.read()
        except OSError as error:
            if isinstance(error, builtins.TimeoutError):
                raise TimeoutError(
                    f"{self} did not answer within {timeout_s:g} s: it waits for other workers "
                    "(TORCH_RING_ELASTIC_TIMEOUT)"
                ) from None
            raise RingError(f"{self} cannot be reached: {error}") from None
        except http.client.HTTPException as error:
            raise RingError(f"{self} has broken off its answer: {error!r}") from None
        finally:
            connection.close()
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status != http.client.OK:
            raise RingError(f"{self} refuses {method} {path}: {answer.status} {answer.reason}")
        return data


def horovod_driver(environment: Mapping[str, str] = os.environ) -> HorovodDriver | None:
    """Return the elastic driver that has started this process; None: none has.

    Raises:
        InvalidArgumentError: one has, and variables of it are missing or wrong.
    """
    address = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    if not address or environment.get("HOROVOD_ELASTIC", "0") in ("", "0"):
        return None
    port, host, local_rank = (environment.get(name, "") for name in _VARIABLES)
    for name, number in ((_VARIABLES[0], port), (_VARIABLES[2], local_rank)):
        if not number.isdecimal():
            raise InvalidArgumentError(f"HOROVOD_ELASTIC is set, and {name}={number!r}: no number")
    if not host:
        raise InvalidArgumentError("HOROVOD_ELASTIC is set, and HOROVOD_HOSTNAME is not")
    return HorovodDriver(address, int(port), f"{host}:{local_rank}")
