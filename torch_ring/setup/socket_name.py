# SPDX-License-Identifier: Apache-2.0
"""socket_name: the name of the Unix socket at which the ranks of a host meet.

It is the same for all ranks of a start of a job on a host and node, and for no other start that
can be told from this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping

from torch.distributed import DistError

from torch_ring.errors import RingError
from torch_ring.setup.claim import starter
from torch_ring.setup.job_key import AuthenticatedStore
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import is_loopback_name

__all__ = ["advice_on_missing", "socket_name", "socket_name_by_store"]


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
    if start := starter(identity.launcher, os.getpid()):
        return start
    raise RingError(
        f"cannot see the process that started this rank ({identity.source()}) in /proc: set "
        "MASTER_ADDR to 127.0.0.1 and MASTER_PORT to a free port, on all ranks of this host"
    )
