"""trace_process: what of the tracing every process has, whether it asks for it or not."""

from __future__ import annotations

from torch_ring.tracing.flight_recorder import handle_signal, watch_errors
from torch_ring.tracing.whereabouts import answer_questions

__all__ = ["trace_process"]


def trace_process(flight_dir: str = "") -> None:
    """From now on, write dumps of errors and answer other ranks' questions. Once more does nothing.

    Args:
        flight_dir: TORCH_RING_FLIGHT_DIR of a group of torch.distributed; ``init()`` tells its own.
    """
    watch_errors()
    handle_signal(flight_dir)
    answer_questions()
