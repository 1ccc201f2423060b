"""Who am I, and where do the ranks meet: read from what the launcher left in the environment."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from torch_ring.errors import InvalidArgumentError, RingError, TimeoutError

__all__ = ["Identity", "discover", "open_store"]

_DEFAULT_PORT = 29400


@dataclass(frozen=True)
class Identity:
    """This process among all of them, as its launcher sees it.

    Attributes:
        rank, size: 0-based index of this process; number of processes.
        local_rank, local_size: the same within its node.
        launcher: who started it, a key of `LAUNCHERS`, or "python" when nobody did.
        job: what distinguishes this start of the job from others that meet in the same store.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "python"
    job: str = ""


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher numbers its processes."""

    rank: str
    size: str
    local_rank: str
    local_size: str | None  # None: not told
    job: tuple[str, ...] = ()  # what identifies one start of a job
    requires: str | None = None  # a variable that is absent when the others are only inherited


# In order of precedence: torchrun may be started by srun, and then its ranks count.
LAUNCHERS: dict[str, Launcher] = {
    "torchrun": Launcher(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ),
    "horovodrun": Launcher(
        "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    ),
    "Open MPI": Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    "MPICH": Launcher(  # and Intel MPI: both are started by Hydra
        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    ),
    "srun": Launcher(
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        None,
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        requires="SLURM_STEP_ID",  # in an salloc shell there are tasks, but this is none of them
    ),
}


def discover(environment: Mapping[str, str] = os.environ) -> Identity:
    """Return who this process is; a process that nobody launched is rank 0 of 1.

    Raises:
        InvalidArgumentError: a launcher's variables are incomplete, or contradict one another.
    """
    for name, launcher in LAUNCHERS.items():
        if launcher.rank not in environment:
            continue
        if launcher.requires is not None and launcher.requires not in environment:
            continue
        return _read(name, launcher, environment)
    return Identity()


def _read(name: str, launcher: Launcher, environment: Mapping[str, str]) -> Identity:
    rank = _whole(launcher.rank, environment)
    size = _whole(launcher.size, environment)
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"{launcher.rank}={rank} is not in {launcher.size}={size}")
    job = "/".join(environment[v] for v in launcher.job if v in environment)
    if name == "srun":
        local_size = _slurm_local_size(environment, size)
    elif launcher.local_size is not None and launcher.local_size in environment:
        local_size = _whole(launcher.local_size, environment)
    else:
        local_size = size
    if launcher.local_rank in environment:
        local_rank = _whole(launcher.local_rank, environment)
    else:
        local_rank = rank % local_size
    if not 0 <= local_rank < local_size:
        raise InvalidArgumentError(
            f"{launcher.local_rank}={local_rank} is not below the {local_size} processes of a node"
        )
    return Identity(rank, size, local_rank, local_size, name, job)


def _whole(variable: str, environment: Mapping[str, str]) -> int:
    text = environment.get(variable)
    if text is None:
        raise InvalidArgumentError(f"{variable} is not set, though others of its launcher are")
    if not text.strip().isdecimal():
        raise InvalidArgumentError(f"{variable}={text!r}: must be a whole number")
    return int(text)


def _slurm_local_size(environment: Mapping[str, str], size: int) -> int:
    """Return the tasks of this node, from "2(x3),1": two on three nodes, one on the fourth."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return size
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InvalidArgumentError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not understood")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _whole("SLURM_NODEID", environment) if "SLURM_NODEID" in environment else 0
    return counts[min(node, len(counts) - 1)]


def first_host(hostlist: str) -> str:
    """Return the first host of a Slurm host list: "gpu01" of "gpu[01-03,07],login"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", hostlist)
    if match is None:
        raise InvalidArgumentError(f"{hostlist!r} is not a list of hosts")
    return match[1] + (match[2] or "")


# --- the store


def open_store(
    identity: Identity, timeout_s: float, environment: Mapping[str, str] = os.environ
) -> tuple[TCPStore, str]:
    """Return a client of the job's store, and the host that serves it.

    Rank 0 serves, unless torchrun's agent does. Where the ranks find it: at MASTER_ADDR and
    MASTER_PORT; on Slurm's first host; on one host, by a Unix socket that only this job's processes
    know; on several hosts, by MPI.

    Raises:
        TimeoutError: the store did not answer in time.
        InvalidArgumentError: there is no way to find it; says what to set.
    """
    address = _address(identity, environment)
    if address is None and identity.local_size == identity.size:
        return _meet_on_host(identity, timeout_s)
    if address is None:
        return _meet_by_mpi(identity, timeout_s)
    host, port = address
    serves = identity.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return _connect(host, port, serves, timeout_s), host


def _address(identity: Identity, environment: Mapping[str, str]) -> tuple[str, int] | None:
    host = environment.get("MASTER_ADDR")
    port = _whole("MASTER_PORT", environment) if "MASTER_PORT" in environment else None
    if host:
        return host, port or _DEFAULT_PORT
    if identity.launcher == "torchrun":
        raise InvalidArgumentError("RANK is set, but MASTER_ADDR is not: set it to rank 0's host")
    if identity.launcher == "srun" and identity.local_size < identity.size:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        if nodes:
            # The same on all ranks, and another one for the next job step on these hosts.
            job, step = environment.get("SLURM_JOB_ID", "0"), environment["SLURM_STEP_ID"]
            derived = 20_000 + (int(job) * 131 + int(step)) % 10_000
            return first_host(nodes), port or derived
    return None


def _connect(
    host: str, port: int, serves: bool, timeout_s: float, listener: socket.socket | None = None
) -> TCPStore:
    try:
        return TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except DistError as error:
        if serves:
            raise RingError(f"rank 0 cannot serve the store at {host}:{port}: {error}") from None
        raise TimeoutError(
            f"rank 0 did not arrive: no store answered at {host}:{port} within {timeout_s:g} s"
        ) from None


def _meet_on_host(identity: Identity, timeout_s: float) -> tuple[TCPStore, str]:
    """Meet without an address: rank 0 tells its port to the job's other processes on this host."""
    name = f"\0torch_ring/{os.getuid()}/{identity.job or _launch_key(identity)}"
    deadline = time.monotonic() + timeout_s
    if identity.rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = _connect("127.0.0.1", port, True, timeout_s, listener)
        _tell_port(name, port, identity.size - 1, deadline)
        return store, "127.0.0.1"
    while True:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.settimeout(max(0.1, deadline - time.monotonic()))
                client.connect(name)
                _require_same_user(client)
                (port,) = struct.unpack("!H", client.recv(2))
                break
            except (OSError, struct.error):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank 0 did not arrive: nobody on this host has opened the job's meeting "
                        f"point within {timeout_s:g} s"
                    ) from None
        time.sleep(0.02)
    return _connect("127.0.0.1", port, False, timeout_s), "127.0.0.1"


def _tell_port(name: str, port: int, times: int, deadline: float) -> None:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(name)
    except OSError as error:
        server.close()
        raise RingError(f"another job on this host has the meeting point {name[1:]}") from error
    server.listen(times)

    def serve() -> None:
        with server:
            for _ in range(times):
                server.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    _require_same_user(client)
                    client.sendall(struct.pack("!H", port))

    threading.Thread(target=serve, name="torch_ring rendezvous", daemon=True).start()


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])


def _require_same_user(connection: socket.socket) -> None:
    if peer_user(connection) != os.getuid():
        raise OSError("a process of another user is at the job's meeting point")


def _launch_key(identity: Identity) -> str:
    """Return what this launch and no other has: the process that started all the ranks of a host.

    It is the nearest ancestor that has no rank itself: mpirun, Hydra's proxy, Slurm's step daemon.
    """
    variable = LAUNCHERS[identity.launcher].rank.encode() + b"="
    for pid in _ancestors():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's: no rank of this job
            environment = []
        if not any(entry.startswith(variable) for entry in environment):
            started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
            return f"{pid}.{started}"
    raise RingError(f"no process has started this one as a rank of {identity.launcher}")


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 0:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _meet_by_mpi(identity: Identity, timeout_s: float) -> tuple[TCPStore, str]:
    try:
        from mpi4py import MPI
    except ImportError:
        raise InvalidArgumentError(
            f"{identity.launcher} has started {identity.size} ranks on several hosts: set "
            "MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there) on all of them, or "
            "install mpi4py"
        ) from None
    return meet_by_communicator(MPI.COMM_WORLD, timeout_s)


def meet_by_communicator(comm: Any, timeout_s: float) -> tuple[TCPStore, str]:
    """Meet at a store of rank 0, whose address an mpi4py communicator hands round."""
    host, port, store = "", 0, None
    if comm.Get_rank() == 0:
        listener = socket.create_server(("", 0))
        port = listener.getsockname()[1]
        host = socket.gethostname()
        store = _connect("127.0.0.1", port, True, timeout_s, listener)
    host, port = comm.bcast((host, port), root=0)
    return store or _connect(host, port, False, timeout_s), host


def from_communicator(comm: Any) -> Identity:
    """Return who this process is in an mpi4py communicator."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return Identity(
            comm.Get_rank(), comm.Get_size(), node.Get_rank(), node.Get_size(), "mpi4py"
        )
    finally:
        node.Free()


def with_overrides(identity: Identity, **given: int | None) -> Identity:
    """Return `identity` with what was given explicitly.

    Raises:
        InvalidArgumentError: a rank is not below its size.
    """
    changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    result = replace(identity, **changes)
    if not (0 <= result.rank < result.size and 0 <= result.local_rank < result.local_size):
        raise InvalidArgumentError(f"{result} has a rank that is not below its size")
    return result
