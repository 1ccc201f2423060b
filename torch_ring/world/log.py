"""set_up_log: where the log of torch_ring goes."""

from __future__ import annotations

import logging

from torch_ring.config import Config

__all__ = ["set_up_log"]

_log = logging.getLogger("torch_ring")


def set_up_log(config: Config) -> None:
    """Log to stderr, unless the program has set up logging."""
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[torch_ring] %(message)s"))
        _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(config.log_level.upper())
