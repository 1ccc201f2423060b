"""hosts: network namespaces that stand for hosts."""

import contextlib
from collections.abc import Iterator

import namespaces
import pytest


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Network namespaces of three hosts that reach each other; removed afterwards."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(namespaces.hosts(3))
        except OSError as error:
            if "netns add" not in str(error):
                raise
            pytest.skip(f"no network namespaces here: {error}")
        yield [host.namespace for host in made]
