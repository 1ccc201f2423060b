# SPDX-License-Identifier: Apache-2.0
"""The log of torch_ring."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from pool import run


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Context that collects the messages of torch_ring's logger."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_ring")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _warnings_of(program: Callable[..., object], args: tuple[Any, ...]) -> list[str]:
    with logged() as messages:
        program(*args)
    return messages


def told(
    program: Callable[..., object], size: int, *args: Any, transport: str = "shm", by: int = 0
) -> list[str]:
    """Run a program on ranks; return the messages of one of them. The others have none."""
    messages = run(_warnings_of, size, args=(program, args), transport=transport)
    mine = messages.pop(by)
    assert messages == [[]] * (size - 1)
    return mine
