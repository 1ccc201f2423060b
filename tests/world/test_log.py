# SPDX-License-Identifier: Apache-2.0
"""The logger `torch_ring`: lines on stderr, unless the program has set up logging."""

from __future__ import annotations

import contextlib
import io
import logging

from pool import run

import torch_ring as hvd

LINE = "2 ranks on one host, by shared memory"


def printed(sets_up: bool, level: str = "") -> str:
    """Return the lines of init(), and of a program that sets up logging before it."""
    logger = logging.getLogger("torch_ring")
    logger.handlers.clear()  # of other tests in this process
    logger.setLevel(level or logging.NOTSET)
    logging.root.handlers.clear()
    with contextlib.redirect_stderr(io.StringIO()) as lines:
        if sets_up:
            logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        hvd.init()
        hvd.shutdown()
    return lines.getvalue()


def test_init_prints_unless_the_program_has_set_up_logging():
    assert run(printed, 2, args=(False,), initialized=False) == [f"[torch_ring] {LINE}\n", ""]
    assert run(printed, 2, args=(True,), initialized=False) == [f"INFO torch_ring: {LINE}\n", ""]
    assert run(printed, 2, args=(True, "WARNING"), initialized=False) == ["", ""]
