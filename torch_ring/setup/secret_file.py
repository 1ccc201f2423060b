# SPDX-License-Identifier: Apache-2.0
"""read_secret: the secret of a job from a file that no other user can read."""

from __future__ import annotations

import os
import stat

from torch_ring.errors import InvalidArgumentError

__all__ = ["read_secret"]

_VARIABLE = "TORCH_RING_SECRET_FILE"
_MOST_BYTES = 4096


def read_secret(path: str) -> str:
    """Return the secret in a file, without white space around it.

    Only the file's owner, this user or root, may read it (mode 0600 or 0400); or its file system
    must be mounted read-only, as Kubernetes mounts secrets.

    Raises:
        InvalidArgumentError: there is no such file, others may read it, or it has no secret.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            _require_privacy(path, file.fileno())
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(f"{_VARIABLE}={path!r}: cannot read it: {error}") from None
    secret = data.strip()
    if not secret or len(data) > _MOST_BYTES:
        raise InvalidArgumentError(
            f"{_VARIABLE}={path!r}: must have a secret of 1 to {_MOST_BYTES} bytes: make one with "
            f"`openssl rand -hex 32`"
        )
    return os.fsdecode(secret)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer would block


def _require_privacy(path: str, fd: int) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgumentError(f"{_VARIABLE}={path!r}: must be a regular file")
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return
    if found.st_uid not in (os.getuid(), 0):
        raise InvalidArgumentError(
            f"{_VARIABLE}={path!r}: belongs to user {found.st_uid}: must belong to user "
            f"{os.getuid()} or to root"
        )
    if found.st_mode & 0o077:
        raise InvalidArgumentError(
            f"{_VARIABLE}={path!r}: other users may use it (mode {stat.S_IMODE(found.st_mode):04o})"
            f": type `chmod 600 {path}`, or mount it read-only"
        )
