# SPDX-License-Identifier: Apache-2.0
"""The worlds in which a test runs: transports and numbers of ranks."""

import pytest
from slow import slow

on_both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])
on_all_worlds = pytest.mark.parametrize(
    ("transport", "size"),
    [
        *[(transport, size) for transport in ("shm", "tcp") for size in (1, 2, 3)],
        *[slow(transport, 4) for transport in ("shm", "tcp")],
    ],
)
on_most_worlds = pytest.mark.parametrize(
    ("transport", "size"), [("shm", 1), ("shm", 2), ("shm", 3), ("tcp", 2), ("tcp", 3)]
)
