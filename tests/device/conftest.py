# SPDX-License-Identifier: Apache-2.0
"""Marks all tests here as slow: compiling the stand-ins takes a minute. Most of them need these."""

from __future__ import annotations

from pathlib import Path

import device_double
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slow)
            if item.path.name != "test_nccl_header.py":
                item.add_marker(device_double.needed)
