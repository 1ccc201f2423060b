# SPDX-License-Identifier: Apache-2.0
"""The server of programs that find torch in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from other_system import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()
