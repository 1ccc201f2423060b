"""serve and ask: a Unix socket by whose name one host's ranks find rank 0 without an address.

The name is derived from the launcher's name for this start of the job, or from the process that
started all the ranks, so that no other job has it. It is an abstract name: no file is left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch_ring.errors import RingError, TimeoutError
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.launchers import LAUNCHERS, Identity
from torch_ring.rendezvous.network import require_same_user

__all__ = ["ask", "serve", "socket_name"]

_ANSWER_BYTES = 4096


def socket_name(identity: Identity) -> str:
    """Return the name of rank 0's socket, the same for all ranks of this start of the job."""
    job = identity.job or _starter(identity)
    name = f"{os.getuid()}/{identity.launcher}/{job}/{identity.part}"
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"\0torch_ring/{digest[:32]}"


@contextlib.contextmanager
def serve(name: str, answer: bytes) -> Iterator[None]:
    """Send `answer` to every process of this user that connects to `name`, while the context lasts.

    Raises:
        RingError: another process has bound the name.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            raise RingError(
                f"another process of this job on this host says that it is rank 0: {error}"
            ) from None
        listener.listen(1024)
        thread = threading.Thread(
            target=_answer_all, args=(listener, answer), name="torch_ring rendezvous", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept()
            thread.join()


def ask(name: str, deadline: Deadline) -> bytes:
    """Connect to the process that serves `name` and return its answer.

    Raises:
        TimeoutError: no process answered before the deadline.
    """
    while not deadline.passed():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(max(deadline.left_s(), 0.01))
            client.connect(name)
            require_same_user(client)
            answer = b"".join(iter(lambda: client.recv(_ANSWER_BYTES), b""))
            if answer:
                return answer
        time.sleep(0.02)
    raise TimeoutError(
        f"rank 0 did not arrive on this host {deadline}: has its process started, and does it call "
        "init()?"
    )


def _answer_all(listener: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # shut down
        with connection, contextlib.suppress(OSError):
            require_same_user(connection)
            connection.settimeout(1.0)
            connection.sendall(answer)


def _starter(identity: Identity) -> str:
    """Return the process that started all ranks of this host, as "<pid>.<start time>".

    That is the nearest ancestor without a rank of its own: mpirun, Hydra's proxy, Slurm's step
    daemon.
    """
    launcher = LAUNCHERS.get(identity.launcher)
    prefix = launcher.rank.encode() + b"=" if launcher else None
    with contextlib.suppress(FileNotFoundError):  # no /proc, or it hides other users' processes
        for pid in _ancestors():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except PermissionError:
                continue  # a wrapper such as sudo, which runs as another user
            if prefix is None or not any(entry.startswith(prefix) for entry in environment):
                return f"{pid}.{_stat(pid)[19]}"
    raise RingError(
        f"cannot see the process that started this rank ({identity.source()}): set MASTER_ADDR to "
        "127.0.0.1 and MASTER_PORT to a free port"
    )


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 0:
        yield pid
        pid = int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
