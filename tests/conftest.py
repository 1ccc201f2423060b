"""--full: the counts of an acceptance, in place of those of every day."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="repeat what depends on luck for hours, not seconds"
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Return whether tests that depend on luck are to be repeated for hours."""
    return bool(request.config.getoption("--full"))
