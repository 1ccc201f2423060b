# SPDX-License-Identifier: Apache-2.0
"""find_store, StorePlace: finds or serves the store through which the hosts of a job meet.

Under an MPI that sets no address for a store, rank 0 broadcasts its address, and a secret, over
mpi4py. MPI's own waits have no deadline, and signals do not interrupt them, so these broadcasts do
not block.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import os
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from torch_ring._C import StoreCall
from torch_ring.config import Config
from torch_ring.errors import (
    InvalidArgumentError,
    PeerLostError,
    RingError,
    TimeoutError,
    first_line,
)
from torch_ring.setup.job_key import AuthenticatedStore, JobKey
from torch_ring.setup.launchers import Identity, expand_hostlist
from torch_ring.setup.network import Deadline, is_loopback, is_loopback_name, own_address
from torch_ring.setup.socket_name import socket_name, socket_name_by_store
from torch_ring.setup.store_client import (
    CONNECT_S,
    StoreClient,
    addresses_of,
    finish,
    host_of,
    without_prefixes,
)

__all__ = [
    "StorePlace",
    "broadcast",
    "common_secret",
    "drop_connections",
    "drop_in_child",
    "find_store",
    "forget",
    "given_store",
    "locate_store",
]

_BUFFER_BYTES = 16_384  # of a broadcast: room for an address, a secret, or the text of an error
_PAUSE_S = 0.001

_process = os.getpid()  # forked children are no ranks of MPI

_secrets: dict[tuple[int, ...], str] = {}  # part -> the secret of its rank 0
# Pending broadcasts: (what, part) -> the request, and the buffer into which MPI may still write.
_begun: dict[tuple[str, tuple[int, ...]], tuple[Any, bytearray]] = {}
_parts: dict[tuple[int, ...], Any] = {}  # part -> its communicator
_inherited: list[Any] = []  # the parent's objects, which a child never destroys


def initialized_world(identity: Identity) -> Any:
    """Return MPI's communicator of the ranks of this world, if the program has initialised MPI.

    None otherwise. MPI is never initialised here: that would wait for all ranks without a deadline,
    and change the effects of fork and exit, for a program that may not want MPI.
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
        advice: what to do without MPI, for the error.

    Raises:
        InvalidArgumentError: there is no MPI; says `advice`.
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
    """Return rank 0's value, a short JSON value. A collective of `comm`.

    After a timeout, the next call with the same `what` continues the broadcast.

    Raises:
        TimeoutError: the value has not arrived over MPI before the deadline.
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
    """Forget all values received over MPI. Call in a forked child."""
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


_DEFAULT_PORT = 29400
_LOOPBACK = "127.0.0.1"
_MOST_TEXT = 1000  # characters of a failure that goes over MPI

Address = tuple[str, int]


class StorePlace:
    """The place of a job's store. A job that needs no store never opens it.

    Args:
        host: the host that serves the store, if known.
        serves: whether this process serves the store.
        find: connects to the store, or serves it, before a deadline; calls a function meanwhile.
        key: authenticates the values in the store.
        leave: leaves the store when all ranks have met. None: the store outlives init().

    Attributes:
        host, serves, key: as given.
        opened: the store, when it has been opened; seen only by the ranks of this start of the job.
    """

    def __init__(
        self,
        host: str | None,
        serves: bool,
        find: Callable[[Deadline, Callable[[], None]], StoreClient],
        key: JobKey | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self.host, self.serves, self.key = host, serves, key or JobKey()
        self.opened: AuthenticatedStore | None = None
        self._find, self._leave = find, leave

    def open(
        self, deadline: Deadline, check: Callable[[], None] = lambda: None
    ) -> AuthenticatedStore:
        """Return the store. Blocks until its server answers.

        Args:
            deadline: when to give up.
            check: called meanwhile; an exception ends the wait.

        Raises:
            TimeoutError: the store did not answer before the deadline.
            RingError: rank 0 cannot serve it.
        """
        if self.opened is None:
            self.opened = AuthenticatedStore(self._find(deadline, check), self.key)
        return self.opened

    def leave(self) -> None:
        """Leave a store that ends with init(). Call on all ranks, when they have met."""
        if self._leave is not None:
            self.opened = None
            self._leave()


def find_store(
    identity: Identity,
    config: Config,
    deadline: Deadline,
    comm: Any,
    store: Store | None,
) -> tuple[StorePlace | None, str | None]:
    """Return the meeting places of the ranks: a store, the name of this host's socket, or both.

    Without a store all ranks are on this host.

    Args:
        identity: this process.
        config: the settings.
        deadline: the deadline of the whole init().
        comm: as for `locate_store`.
        store: a store given by the user, or by a group of torch.distributed; its ranks may have
            different names from their launchers.

    Raises:
        RingError, InvalidArgumentError: as `locate_store`.
    """
    if store is not None:
        place = given_store(store, identity, config.secret)
        return place, socket_name_by_store(place.open(deadline))
    found = locate_store(identity, config, deadline, comm=comm)
    on_host = identity
    if identity.on_one_node() or found is None:
        # Two nodes of torchrun may be on one host. If only some ranks have a secret, they meet and
        # the error names the setting.
        on_host = replace(identity, node=None)
    name = None
    # Without a name, the ranks of this host meet in the store.
    with contextlib.suppress(*() if found is None else (RingError,)):
        name = socket_name(on_host)
    return found, name


# Stores, and connections to them, that the next init() reuses: those of torchrun's agent and of
# worlds of some of the ranks, and those of a failed init(). Rank 0's own store ends when all ranks
# have met: then no stranger can fill its memory or take its descriptors, and its port is free.
_stores: dict[Address, TCPStore] = {}
_served: set[Address] = set()  # served by this process
_mpi_addresses: dict[tuple[int, ...], Address] = {}  # part -> address of its rank 0's store


def locate_store(
    identity: Identity,
    config: Config,
    deadline: Deadline,
    *,
    comm: Any = None,
    environment: Mapping[str, str] = os.environ,
) -> StorePlace | None:
    """Return the place of this job's store; None: all ranks are on this host, and need no store.

    Rank 0 serves the store, unless torchrun's agent does. Worlds of some of the ranks that find it
    by an address share the store of the launcher's rank 0, which must then be in one of them; other
    such worlds have a store each. The store is

    1. nowhere, if the ranks are on one host: MASTER_ADDR is a loopback address, or the launcher
       says so, and there is no secret to protect a store;
    2. at MASTER_ADDR and MASTER_PORT (default 29400);
    3. at the address that rank 0 of `comm`, an mpi4py communicator, broadcasts;
    4. under Slurm, on the first host of the step, whose first rank serves it (rank 0 may be on
       another one in a heterogeneous job), at MASTER_PORT or one derived from job and step;
    5. at the address that rank 0 broadcasts over MPI, if mpi4py is installed.

    Raises:
        RingError: rank 0 cannot serve it.
        InvalidArgumentError: none of these ways is open; says what to set.
    """
    host, port = environment.get("MASTER_ADDR", ""), _master_port(environment)
    shared, secret = bool(identity.part), ""
    serves, server = identity.launched_rank() == 0, "rank 0"
    if is_loopback_name(host) or (identity.on_one_node() and not (host and config.secret)):
        return None
    world = initialized_world(identity) if comm is None else comm
    if world is not None:
        secret = common_secret(world, identity, deadline)
    if host:
        address = (host, port or _DEFAULT_PORT)
    elif comm is None and identity.launcher == "init":
        return None
    elif comm is None and identity.launcher == "srun":
        address = (_slurm_host(environment), port or _slurm_port(identity))
        if (node := environment.get("SLURMD_NODENAME")) is not None:
            serves = node == address[0] and environment.get("SLURM_LOCALID") == "0"
            server = "the step's first rank"
    else:
        if world is None:
            world = require_world(identity, _advice(identity))
            secret = common_secret(world, identity, deadline)
        address = _ask_mpi(world, identity, config, deadline)
        serves, shared = identity.rank == 0, False
    is_agents = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_agents:
        serves, server = False, "torchrun's agent"

    def find(deadline: Deadline, check: Callable[[], None]) -> StoreClient:
        if serves:
            me, one_host = f"rank {identity.launched_rank()}", identity.on_one_node()
            store = _serve(address, deadline, check, me, one_host=one_host)
        else:
            store = _connect(address, server, deadline, check)
        view = _of_part(PrefixStore(f"torch_ring/{identity.job}", store), identity)
        name = f"the job's store at {_text(address)}, which {server} serves,"
        return StoreClient(view, deadline, name, check)

    def leave() -> None:
        _stores.pop(address, None)
        _served.discard(address)
        _mpi_addresses.clear()  # the next store has another port

    key = JobKey(config.secret or secret, identity.job)
    place = StorePlace(address[0], serves, find, key, None if is_agents or shared else leave)
    if identity.part and serves:
        place.open(deadline)  # another world may need it, even if this one does not
    return place


def given_store(store: Store, identity: Identity, secret: str = "") -> StorePlace:
    """Return the place of a store given by the user."""
    # A later world over the same store may have another size.
    view = _of_part(PrefixStore(f"torch_ring/{identity.size}", store), identity)
    served = without_prefixes(store)
    where = f", at {_text((served.host, served.port))}," if isinstance(served, TCPStore) else ""

    def find(deadline: Deadline, check: Callable[[], None]) -> StoreClient:
        return StoreClient(
            view, deadline, f"the store that was given to {deadline.call}{where}", check
        )

    return StorePlace(host_of(store), False, find, JobKey(secret))


def _of_part(store: Store, identity: Identity) -> Store:
    """Return this part's view of a store that all parts of the ranks share."""
    return PrefixStore("-".join(map(str, identity.part)), store) if identity.part else store


def drop_connections() -> None:
    """Drop the connections to other processes' stores, which may be gone after a failure."""
    for address in [a for a in _stores if a not in _served]:
        del _stores[address]
    _mpi_addresses.clear()  # either all ranks ask again, or none


def drop_in_child() -> None:
    """Drop the parent's connections and stores in a forked child, without touching them."""
    for address in _served:
        # The store is never destroyed: its destructor joins a thread that the child does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_stores[address]))
    for known in (_stores, _served, _mpi_addresses):
        known.clear()
    forget()


# --- addresses


def _master_port(environment: Mapping[str, str]) -> int:
    text = environment.get("MASTER_PORT", "").strip()
    if text and not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise InvalidArgumentError(f"MASTER_PORT={text!r}: must be a port, 1 to 65535")
    return int(text or 0)


def _slurm_host(environment: Mapping[str, str]) -> str:
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environment.get(variable):
            return expand_hostlist(environment[variable])[0]
    raise InvalidArgumentError(
        "SLURM_STEP_NODELIST is not set: set MASTER_ADDR (rank 0's host) on all ranks"
    )


def _slurm_port(identity: Identity) -> int:
    """Return a port: the same on all ranks, different for each step, and not ephemeral."""
    return 10_000 + zlib.crc32(identity.job.encode()) % 20_000


def _advice(identity: Identity) -> str:
    return (
        f"the {identity.size} ranks of {identity.source()} may be on several hosts: set "
        "MASTER_ADDR (rank 0's host; 127.0.0.1 if all are on this one) and MASTER_PORT (a free "
        f"port there, or {_DEFAULT_PORT}) on all of them"
    )


def _ask_mpi(comm: Any, identity: Identity, config: Config, deadline: Deadline) -> Address:
    """Return the address of rank 0's store; rank 0 makes it. A collective of `comm`."""
    if identity.part in _mpi_addresses:
        return _mpi_addresses[identity.part]
    answer: Address | str = ""
    if identity.rank == 0:
        try:
            host = own_address(config.interface, _LOOPBACK if identity.on_one_node() else None)
            listener = socket.create_server((host, 0), family=_family(host))
            answer = (host, listener.getsockname()[1])
            _serve(answer, deadline, lambda: None, listener=listener)
        except (OSError, RingError, InvalidArgumentError) as error:
            answer = str(error)[:_MOST_TEXT]
    answer = broadcast(comm, identity, "address", answer, deadline)
    if isinstance(answer, str):
        raise RingError(f"rank 0 cannot serve the job's store: {answer}")
    host, port = answer
    _mpi_addresses[identity.part] = (host, port)
    return host, port


# --- stores


def _serve(
    address: Address,
    deadline: Deadline,
    check: Callable[[], None],
    me: str = "rank 0",
    *,
    one_host: bool = False,
    listener: socket.socket | None = None,
) -> TCPStore:
    if address not in _stores:
        listener = listener or _listen(address, one_host, deadline, check, me)
        # The store also connects to itself, at the address that the others use.
        fd = listener.detach() if listener else None
        late = (
            f"{me} cannot reach the job's store, which it serves, at {_text(address)} "
            f"{deadline}: is that an address of {me}'s host (MASTER_ADDR)?"
        )
        call = StoreCall.serve(*address, deadline.timeout_s, fd)
        finish(call, deadline, check, late)
        try:
            _stores[address] = call.result()
        except RuntimeError as error:
            raise RingError(
                f"{me} cannot serve the job's store at {_text(address)}: {first_line(error)}"
            ) from None
        _served.add(address)
    return _stores[address]


def _listen(
    address: Address, one_host: bool, deadline: Deadline, check: Callable[[], None], me: str
) -> socket.socket | None:
    """Listen at the address that the others use for this rank, and if possible at no other.

    Returns:
        None if the port is in use: a store of this process may have it.
    """
    host, port = address
    own = ""
    with contextlib.suppress(InvalidArgumentError):  # a name that only the others know
        own = addresses_of(host, deadline, check)[0]
    try:
        # Other hosts may resolve this host's name to another address than this host does.
        if own and (one_host or is_loopback_name(host) or not is_loopback(own)):
            return socket.create_server((own, port), family=_family(own))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        # Not an address of this host: the others reach it through address translation (NAT).
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RingError(f"{me} cannot listen at port {port}: {error}") from None


def _connect(
    address: Address, server: str, deadline: Deadline, check: Callable[[], None]
) -> TCPStore:
    if address not in _stores:
        _wait_for_server(address, server, deadline, check)
        late = (
            f"{_text(address)} accepts connections, but has not answered as {server}'s store "
            f"{deadline}: is {server} stopped, or does another program have its port "
            "(MASTER_PORT)?"
        )
        call = StoreCall.connect(*address, CONNECT_S)
        finish(call, deadline, check, late)
        try:
            store = call.result()
        except RuntimeError as error:
            raise PeerLostError(
                f"no store answers at {_text(address)}: has {server} exited, or does another "
                f"program have its port (MASTER_PORT)? {first_line(error)}"
            ) from None
        store.set_timeout(timedelta(seconds=deadline.timeout_s))
        _stores[address] = store
    return _stores[address]


def _wait_for_server(
    address: Address, server: str, deadline: Deadline, check: Callable[[], None]
) -> None:
    """Wait for the server as TCPStore does, but quietly, interruptibly, and until our deadline."""
    reason: object = "no time was left"
    hosts: list[str] = []
    while not deadline.passed():
        check()
        hosts = []
        try:
            hosts = addresses_of(address[0], deadline, check)
        except InvalidArgumentError as error:  # its name may appear with it
            reason = error
        for host in hosts:
            try:
                left_s = max(0.01, min(5.0, deadline.left_s()))
                socket.create_connection((host, address[1]), left_s).close()
                return
            except OSError as error:
                reason = error
        time.sleep(min(0.05, deadline.left_s()))
    where = "is that an address of rank 0's host (MASTER_ADDR)?"
    if hosts and all(map(is_loopback, hosts)):
        where = (
            f"{address[0]} is {hosts[0]} here, this host itself: set MASTER_ADDR to an address of "
            "rank 0's host that the others reach, or correct /etc/hosts"
        )
    raise TimeoutError(
        f"{server} did not arrive {deadline}: nothing answers at {_text(address)} ({reason}): "
        f"{where}"
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _text(address: Address) -> str:
    return "{}:{}".format(*address)
