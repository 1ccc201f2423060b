"""The log of torch_ring."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


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
