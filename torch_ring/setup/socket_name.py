# SPDX-License-Identifier: Apache-2.0
"""socket_name, listen_as_rank: the names of a job's Unix sockets on a host.

The name at which the ranks meet is the same for all ranks of a start of a job on a host and node.
Two jobs may have one name: two scripts the same MASTER_ADDR and MASTER_PORT, perhaps by default, or
two jobs of one process nothing but that process. So the socket at which a rank listens until its
world ends is named after that name and the rank: another process cannot have the rank.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.distributed import DistError

from torch_ring.errors import RingError
from torch_ring.setup.job_key import AuthenticatedStore
from torch_ring.setup.launchers import LAUNCHERS, Identity
from torch_ring.setup.network import Deadline, is_loopback_name, listen_unix, require_same_user
from torch_ring.setup.proc import ancestors, stat_of

__all__ = ["advice_on_missing", "listen_as_rank", "socket_name", "socket_name_by_store"]


def socket_name(identity: Identity, environment: Mapping[str, str] = os.environ) -> str:
    """Return the name, the same for all ranks of this start of the job on this host and node.

    Raises:
        RingError: this job cannot be told from others.
    """
    address = [environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    if is_loopback_name(address[0]):
        address[0] = "localhost"
    job = identity.job or ("" if address[0] else _starter(identity))
    # Two nodes of torchrun may be on one host: each knows its own number of ranks.
    return _named(os.getuid(), identity.launcher, job, *address, identity.node, identity.part)


def advice_on_missing(identity: Identity, environment: Mapping[str, str] = os.environ) -> str:
    """Return the likely reason why ranks that meet at this name alone miss others; "": unknown."""
    address = environment.get("MASTER_ADDR", "")
    if is_loopback_name(address) and not identity.on_one_node():
        return (
            f"MASTER_ADDR={address} means that all ranks are on this host: if they are not, set it "
            "on all of them, also on rank 0, to an address of rank 0's host that the others reach. "
            + _one_user()
        )
    if identity.job:
        return ""
    return (
        "Ranks that different processes have started meet only if MASTER_ADDR and MASTER_PORT are "
        "set: to 127.0.0.1 and a free port, if all of them are on this host. " + _one_user()
    )


def socket_name_by_store(store: AuthenticatedStore) -> str | None:
    """Return the name that the ranks of a store agree on; None: the store cannot do that.

    Only the store itself identifies the ranks that use it. Cost: one operation a rank.
    """
    with contextlib.suppress(DistError, NotImplementedError):
        token = store.compare_set("socket", "", secrets.token_hex(16))
        return _named(os.getuid(), token.decode(errors="replace"))
    return None


def _one_user() -> str:
    return f"Only ranks of one user meet on a host: this one is user {os.getuid()}'s."


def _named(*parts: object) -> str:
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return f"\0torch_ring/{digest[:32]}"


def _starter(identity: Identity) -> str:
    """Return the process that started all ranks of this host, as "<pid>.<start time>".

    It is the nearest ancestor without a rank of its own: mpirun, Hydra's proxy, Slurm's step
    daemon, a script.
    """
    launcher = LAUNCHERS.get(identity.launcher)
    prefix = launcher.rank.encode() + b"=" if launcher else None
    with contextlib.suppress(OSError):  # it has just ended
        for parent in ancestors(os.getpid()):
            try:
                environment = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
            except PermissionError:
                continue  # a wrapper of another user, such as sudo
            if prefix is None or not any(entry.startswith(prefix) for entry in environment):
                return f"{parent}.{stat_of(parent)[19]}"
    raise RingError(
        f"cannot see the process that started this rank ({identity.source()}) in /proc: set "
        "MASTER_ADDR to 127.0.0.1 and MASTER_PORT to a free port, on all ranks of this host"
    )


_PAUSE_S = 0.01
_LOOK_S = 1.0
_LEAVING_S = 2.0  # seconds in which a process that ends, or leaves its world, gives its rank up


def listen_as_rank(
    name: str | None,
    identity: Identity,
    deadline: Deadline,
    watch: Callable[[float], object],
    *,
    is_new: bool,
) -> socket.socket:
    """Return the socket at which this rank listens for others of its host.

    Call it when this rank has met another one or leads its host. Then at least one rank of two jobs
    that have mixed finds its name taken, and fails all that it has met; and the holder of the name
    ends its world, unless that is older than a minute.

    Args:
        name: the name at which the ranks of this host meet; None: no other job can have it.
        identity: this process.
        deadline: the deadline of init().
        watch: called while it waits, for some seconds.
        is_new: whether this process has not been in a world yet. Otherwise it may have another rank
            in the next one, while others are still in the last.

    Raises:
        RingError: another process is this rank already.
    """
    if name is None:
        return listen_unix(f"\0torch_ring/{secrets.token_hex(8)}")
    name = f"{name}/{identity.rank}"
    me = f"rank {identity.rank} of {identity.size}"
    patience = Deadline(_LEAVING_S) if is_new else deadline
    holder = 0
    while True:
        try:
            return listen_unix(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        holder = holder or _holder(name)
        if holder in ancestors(os.getpid()):
            raise RingError(
                f"{me} is process {holder}, which has started this one: it has inherited that "
                "rank's variables. Start it without them (RANK, WORLD_SIZE and MASTER_PORT, or "
                "those of your launcher) if it is to be alone, or give it a rank, a size and a "
                "MASTER_PORT of its own job"
            )
        if patience.passed() or deadline.passed():
            holder = _holder(name, is_told=is_new)
            raise RingError(
                f"two processes are {me}: process {holder} is, too, in a job of the same name. If "
                "both have just begun, end both: they may have mixed. Give each its own "
                "MASTER_PORT, with MASTER_ADDR=127.0.0.1 if its ranks are on one host"
            )
        watch(_PAUSE_S)


def _holder(name: str, *, is_told: bool = False) -> int:
    """Return the process that listens at a name; 0: it is gone, unseen or another user's.

    With `is_told` it hears that this process has come as the same rank (`csrc/control/acceptor.h`).
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as look:
        look.settimeout(_LOOK_S)  # its backlog may be full
        if is_told:
            look.bind(f"\0torch_ring/rival/{secrets.token_hex(8)}")
        look.connect(name)
        return require_same_user(look)
    return 0
