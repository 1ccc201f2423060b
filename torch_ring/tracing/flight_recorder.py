"""dump, watch_errors: the last operations of this rank, in a file that ``torchfrtrace`` reads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import tempfile
from pathlib import Path
from typing import Any

from torch_ring import errors
from torch_ring.tracing.operations import own_rank, recorded_sets
from torch_ring.tracing.stacks import main_thread_stack
from torch_ring.tracing.torch_format import to_torch
from torch_ring.world import current
from torch_ring.world.recorded import recorded_groups

__all__ = ["dump", "handle_signal", "watch_errors"]

_log = logging.getLogger("torch_ring")

_PREFIX = "flight_"  # torchfrtrace wants a common prefix and the rank


def dump(path: str | os.PathLike[str]) -> Path:
    """Write the last 2000 operations of this rank, in each process set and group.

    Call it on any rank, at any time, also while operations are in flight; it waits for nobody. A
    file of all ranks in one folder is what ``torchfrtrace FOLDER`` compares: it names the first
    operation that differs, and the ranks that are missing from it.

    Args:
        path: a folder, which is made, for ``flight_RANK`` in it; or a file: its name has a suffix,
            or ends in ``_RANK``. A name that ends in ``.json`` is written as JSON with the same
            fields; any other as torch's flight recorder writes its own, a pickle of plain lists and
            dictionaries.

    Returns:
        The file that was written. Readers never see half of it.

    Raises:
        NotInitializedError: before init(), and without a connected group of the backend ring.
        OSError: the file cannot be written.
    """
    target, rank = Path(path), own_rank()
    content = to_torch(recorded_sets(), main_thread_stack(), rank)
    if not target.suffix and not target.name.endswith(f"_{rank}") and not target.is_file():
        target.mkdir(exist_ok=True)  # another rank may make it, too
    if target.is_dir():
        target = target / f"{_PREFIX}{rank}"
    _write(target, content)
    return target


def _write(target: Path, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode() if target.suffix == ".json" else pickle.dumps(content)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".unfinished")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


# --- without being asked: in a folder that the user has named


def watch_errors() -> None:
    """From now on, write a dump on each RingError and on SIGUSR2, if there is a folder.

    The folder is TORCH_RING_FLIGHT_DIR of the current world, or of a group of torch.distributed.
    Without it no file is written and no signal handler installed.
    """
    errors.add_to_texts(_note)
    current.after_join(_handle_signal)


def _folder() -> Path | None:
    world = current.find_world()
    named = [world.config.flight_dir] if world is not None else []
    named += [group.flight_dir for group in recorded_groups()]
    return next((Path(each) for each in named if each), None)


def _note() -> str:
    """Write a dump; return what the text of an error says of it."""
    folder = _folder()
    if folder is None:
        return ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return f"{errors.NOTE}are in {dump(folder)}]"
    except Exception as error:  # the first error is the one to tell
        return f"{errors.NOTE}could not be written: {error}]"


def _handle_signal() -> None:
    handle_signal(current.config().flight_dir)


def handle_signal(folder: str) -> None:
    """Write a dump on SIGUSR2 from now on, if there is a folder and the program has no handler."""
    if not folder:
        return
    try:
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR2, _on_signal)
    except ValueError:  # init() in another thread than the main one
        _log.warning("SIGUSR2 writes no dump: init() was not called in the main thread")


def _on_signal(_number: int, _frame: object) -> None:
    folder = _folder()
    if folder is not None:
        _log.info("SIGUSR2%s", _note())
