"""Broadcasts over MPI, through mpi4py, before the ranks are connected: of an address and a secret.

MPI's own waits have no deadline and no signal interrupts them, so these broadcasts do not block.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import sys
import time
from typing import Any

from torch_ring.errors import InvalidArgumentError, TimeoutError, first_line
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.launchers import Identity

__all__ = ["broadcast", "common_secret", "forget", "initialized_world", "require_world"]

_BUFFER_BYTES = 16_384  # of a broadcast: room for an address, a secret, or the text of an error
_PAUSE_S = 0.001

_process = os.getpid()  # children that it forks are no ranks of MPI's

_secrets: dict[tuple[int, ...], str] = {}  # part -> what its rank 0 has told
# Broadcasts that have not ended: (what, part) -> the request, and what MPI may still write into.
_begun: dict[tuple[str, tuple[int, ...]], tuple[Any, bytearray]] = {}
_parts: dict[tuple[int, ...], Any] = {}  # part -> its communicator
_inherited: list[Any] = []  # a parent's, which its child never destroys


def initialized_world(identity: Identity) -> Any:
    """Return MPI's communicator of the ranks of this world, if the program has initialised MPI.

    None otherwise. MPI is never initialised here: that waits for all ranks without a deadline, and
    changes what a fork and an exit of the process do, for a program that may not want MPI.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if identity.launcher not in ("Open MPI", "Hydra", "PMI", "srun") or mpi is None:
        return None
    if os.getpid() != _process or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return _world_of(mpi, identity)


def require_world(identity: Identity, advice: str) -> Any:
    """Return MPI's communicator of the ranks of this world; initialises MPI.

    Args:
        identity: this process.
        advice: what to do where there is none.

    Raises:
        InvalidArgumentError: there is none; says `advice`.
    """
    if identity.launcher not in ("Open MPI", "Hydra", "PMI"):
        raise InvalidArgumentError(advice)
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # not installed; finds no MPI library
        raise InvalidArgumentError(f"{advice}, or install mpi4py ({first_line(error)})") from None
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise InvalidArgumentError(f"{advice}, or initialize mpi4py's MPI before torch_ring")
    comm = _world_of(mpi, identity)
    if comm is None:
        raise InvalidArgumentError(
            f"{advice}: the MPI library that mpi4py uses is not the one of the launcher"
        )
    return comm


def common_secret(comm: Any, identity: Identity, deadline: Deadline) -> str:
    """Return a secret that rank 0 has made. A collective of `comm`, the first time."""
    if identity.part not in _secrets:
        own = secrets.token_hex(32) if identity.rank == 0 else None
        _secrets[identity.part] = broadcast(comm, identity, "secret", own, deadline)
    return _secrets[identity.part]


def broadcast(comm: Any, identity: Identity, what: str, value: Any, deadline: Deadline) -> Any:
    """Return rank 0's value, which is short, and which JSON can say. A collective of `comm`.

    One that was given up goes on with the next call for the same thing.

    Raises:
        TimeoutError: MPI has not brought it before the deadline.
    """
    key = (what, identity.part)
    if key not in _begun:
        buffer = bytearray(json.dumps(value).encode().ljust(_BUFFER_BYTES))
        _begun[key] = comm.Ibcast(buffer, root=0), buffer
    request, buffer = _begun[key]
    while not request.Test():
        if deadline.passed():
            raise TimeoutError(f"rank 0's {what} has not arrived over MPI {deadline}")
        time.sleep(_PAUSE_S)
    del _begun[key]
    return json.loads(buffer)


def forget() -> None:
    """Forget what was told, in a forked child."""
    _secrets.clear()
    _inherited.extend([dict(_begun), dict(_parts)])
    _begun.clear()
    _parts.clear()


def _world_of(mpi: Any, identity: Identity) -> Any:
    comm = mpi.COMM_WORLD
    if identity.part and identity.part[-1] < comm.Get_size():
        if identity.part not in _parts:
            _parts[identity.part] = comm.Create_group(comm.Get_group().Incl(identity.part))
        comm = _parts[identity.part]
    same = (comm.Get_rank(), comm.Get_size()) == (identity.rank, identity.size)
    return comm if same else None
