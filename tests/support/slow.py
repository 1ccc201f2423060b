# SPDX-License-Identifier: Apache-2.0
"""The mark `slow`: cases of a test that only `make test-all` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a slow case of a parametrized test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_after(quick: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a test; all but the first `quick` are marked slow."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case) for case in found[:quick]] + [slow(*case) for case in found[quick:]]


on_shm_and_slowly_on_tcp = pytest.mark.parametrize("transport", ["shm", slow("tcp")])
