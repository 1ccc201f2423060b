"""main_thread_stack: where the program of this rank is."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

__all__ = ["is_ours", "main_thread_stack"]


def main_thread_stack(*, whole: bool = False) -> list[dict[str, Any]]:
    """Return the frames of the main thread, innermost first: name, filename and line.

    Frames of torch_ring itself are left out at the inner end, if it is not to be the `whole` stack:
    the program is of interest.
    """
    identity = threading.main_thread().ident
    frame = sys._current_frames().get(identity) if identity is not None else None
    if frame is None:
        return []
    summaries = traceback.extract_stack(frame)
    summaries.reverse()
    frames = [
        {"name": each.name, "filename": each.filename, "line": each.lineno} for each in summaries
    ]
    while not whole and len(frames) > 1 and is_ours(str(frames[0]["filename"])):
        del frames[0]
    return frames


_FOLDER = __file__.rsplit("tracing", 1)[0]


def is_ours(filename: str) -> bool:
    """Return whether a file is one of torch_ring."""
    return filename.startswith(_FOLDER)
