# SPDX-License-Identifier: Apache-2.0
"""CountingStore: a store in memory that counts operations and bytes, by the kind of operation."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from torch.distributed import HashStore


class CountingStore:
    """One of several clients of a HashStore.

    Attributes:
        counts: operations of this client; a look is a `check` of a missing key.
        largest: bytes of the largest value that it has written.
    """

    def __init__(self, store: HashStore | None = None) -> None:
        self.store = store or HashStore()
        self.counts: Counter[str] = Counter()
        self.largest = 0
        self._lock = threading.Lock()

    def client(self) -> CountingStore:
        """Return another client of the same store."""
        return CountingStore(self.store)

    def total(self) -> int:
        """Return the number of operations, without looks."""
        return sum(count for kind, count in self.counts.items() if kind != "check")

    def set(self, key: str, value: bytes) -> None:
        self.largest = max(self.largest, len(value))
        self._count("set")
        self.store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count("check")
        return bool(self.store.check(keys))

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.store, name)

        def counted(*arguments: Any) -> Any:
            self._count(name)
            return operation(*arguments)

        return counted

    def _count(self, kind: str) -> None:
        with self._lock:
            self.counts[kind] += 1
