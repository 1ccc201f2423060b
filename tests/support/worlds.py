# SPDX-License-Identifier: Apache-2.0
"""The worlds in which a test runs: transports and numbers of ranks."""

import pytest
from slow import slow

on_both_transports = pytest.mark.parametrize("transport", ["shm", "tcp"])
on_most_worlds = pytest.mark.parametrize(
    ("transport", "size"), [("shm", 1), ("shm", 3), ("tcp", 2), slow("shm", 2), slow("tcp", 3)]
)
on_all_worlds = pytest.mark.parametrize(
    ("transport", "size"),
    [
        *[("shm", 1), ("shm", 3), ("tcp", 2), slow("shm", 2), slow("tcp", 3)],
        *[slow("tcp", 1), slow("shm", 4), slow("tcp", 4)],
    ],
)
