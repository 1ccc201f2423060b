# SPDX-License-Identifier: Apache-2.0
"""JobKey, AuthenticatedStore: authenticated values in the store that the hosts share.

A store may be open to strangers. With a secret, every value carries an HMAC-SHA256 of the job, the
key under which it is stored and the value itself: only the job's ranks can make one, and a value
moved to another key is detected. Without a secret the code only detects garbage.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
from typing import Any

from torch_ring.errors import RingError
from torch_ring.setup.store_client import StoreClient

__all__ = ["AuthenticatedStore", "JobKey"]


_TAG_BYTES = 32
# A reader of the store can guess secrets offline: each guess costs these rounds, some 20 ms.
_ROUNDS = 50_000


class JobKey:
    """A key derived from the secret of a job.

    Args:
        secret: the ranks' common secret; empty: they have none.
        job: a name of this start of the job, the same on all ranks.

    Attributes:
        secret: as given.
        is_secret: whether only the job's ranks can know it.
    """

    def __init__(self, secret: str = "", job: str = "") -> None:
        self.secret, self.is_secret = secret, bool(secret)
        self._job = job

    def tag(self, name: str, value: bytes) -> bytes:
        """Return the proof (HMAC) that a rank of the job has stored `value` under `name`."""
        return self._digest("store", self._job.encode(), name.encode(), value)

    def of_world(self, *sent: bytes) -> bytes:
        """Return the key of a world, derived from the data that were sent to all its ranks.

        Ranks that have received different data get different keys, and so cannot connect.
        """
        return self._digest("world", self._job.encode(), *sent)

    def _digest(self, purpose: str, *parts: bytes) -> bytes:
        code = hmac.new(_stretched(self.secret), purpose.encode() + b"\0", hashlib.sha256)
        for part in parts:
            code.update(len(part).to_bytes(8, "big"))
            code.update(part)
        return code.digest()


@functools.lru_cache(maxsize=2)
def _stretched(secret: str) -> bytes:
    if not secret:
        return b""
    return hashlib.pbkdf2_hmac("sha256", os.fsencode(secret), b"torch_ring job", _ROUNDS)


class AuthenticatedStore:
    """A store whose values are authenticated. Counters are not: do not trust their values.

    Its other methods are the store's own.

    Args:
        store: the store of the values.
        key: the key of the job.
    """

    def __init__(self, store: StoreClient, key: JobKey) -> None:
        self._store, self._key = store, key

    def set(self, name: str, value: bytes) -> None:
        """Store a value, with its tag before it."""
        self._store.set(name, self._key.tag(name, value) + value)

    def get(self, name: str) -> bytes:
        """Return a value that a rank of the job has stored under `name`.

        Raises:
            RingError: a stranger has stored it.
        """
        data = self._store.get(name)
        tag, value = data[:_TAG_BYTES], data[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._key.tag(name, value)):
            raise RingError(
                f"the value {name!r} in the store is not from a rank of this job: is "
                "TORCH_RING_SECRET the same on all ranks? If it is, somebody else writes into the "
                "store: use another one, or another port"
            )
        return value

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, and return the sum.

        Raises:
            RingError: the stored value is no counter.
        """
        try:
            return self._store.add(name, amount)
        except (ValueError, IndexError) as error:  # raised by std::stoll
            raise RingError(f"the counter {name!r} in the store is damaged: {error}") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
