# SPDX-License-Identifier: Apache-2.0
"""on_ranks: a test whose body runs on each of some ranks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from pool import run


def on_ranks(
    *sizes: int, by: Callable[..., object] = run, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of a test that runs its body on ranks, as `pool.run` does.

    The body gets the test's parameters and fixtures, which must be picklable. Of them, `transport`
    is that of the ranks, and `size` their number.

    Args:
        sizes: numbers of ranks, without a parameter `size`; the body runs on each number in turn.
        by: `pool.run`, or a function like it that does more around the body.
        options: of that function.
    """

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)  # pytest sees the body's parameters
        def test(**given: Any) -> None:
            part = functools.partial(_call_body, body.__module__, body.__name__, given)
            among = {"transport": given["transport"]} if "transport" in given else {}
            for size in sizes or (given["size"],):
                by(part, size, **among, **options)

        return test

    return decorated


def _call_body(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)
