# SPDX-License-Identifier: Apache-2.0
"""The worlds in which a test runs: transports and numbers of ranks."""

import pytest

on_both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])
on_all_worlds = pytest.mark.parametrize(
    ("transport", "size"),
    [(transport, size) for transport in ("shm", "tcp") for size in (1, 2, 3, 4)],
)
on_most_worlds = pytest.mark.parametrize(
    ("transport", "size"), [("shm", 1), ("shm", 2), ("shm", 3), ("tcp", 2), ("tcp", 3)]
)
