"""The mark `slow`: cases of a test that `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case of a parametrized test that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_after(quick: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a test, of which all but the first so many are slow."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case) for case in found[:quick]] + [slow(*case) for case in found[quick:]]


on_shm_and_slowly_on_tcp = pytest.mark.parametrize("transport", ["shm", slow("tcp")])
