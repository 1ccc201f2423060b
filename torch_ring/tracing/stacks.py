"""main_thread_stack: where the program of this rank is."""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["main_thread_stack"]


def main_thread_stack() -> list[dict[str, Any]]:
    """Return the frames of the main thread, innermost first: name, filename and line.

    Frames of torch_ring itself are left out at the inner end: the program is of interest.
    """
    identity = threading.main_thread().ident
    frame = sys._current_frames().get(identity) if identity is not None else None
    frames: list[dict[str, Any]] = []
    while frame is not None:  # without I/O: a frame that has returned keeps its objects meanwhile
        code = frame.f_code
        frames.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    while len(frames) > 1 and str(frames[0]["filename"]).startswith(_FOLDER):
        del frames[0]
    return frames


_FOLDER = __file__.rsplit("tracing", 1)[0]
