# SPDX-License-Identifier: Apache-2.0
"""Tracing: the operations of a job's ranks, with their times (docs/tracing.md).

Open first: `flight_recorder`; `lateness` finds late ranks, `page` draws a recording.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ring.tracing.counters import snapshot as snapshot
    from torch_ring.tracing.flight_recorder import dump as dump
    from torch_ring.tracing.lateness import RankReport as RankReport
    from torch_ring.tracing.lateness import report as report
    from torch_ring.tracing.lateness import stragglers as stragglers

# The names that need torch, by module: the command that draws files does without torch.
_PUBLIC = {
    "RankReport": "lateness",
    "dump": "flight_recorder",
    "report": "lateness",
    "snapshot": "counters",
    "stragglers": "lateness",
}

__all__ = ["RankReport", "dump", "report", "snapshot", "stragglers"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"torch_ring.tracing.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
