# SPDX-License-Identifier: Apache-2.0
"""save and load: one rank writes and reads checkpoints, and all ranks learn the outcome.

Before the file of save() gets its name, it is read once, without the tensors' bytes. So save()
never leaves a file that load() would refuse.
"""

from __future__ import annotations

import io
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from torch_ring import world
from torch_ring.collectives import plain_pickle
from torch_ring.collectives.objects import broadcast_object
from torch_ring.errors import first_line
from torch_ring.state import broadcast_nested
from torch_ring.world.process_set import ProcessSet, global_process_set

__all__ = ["CheckpointError", "load", "save"]

T = TypeVar("T")
_REQUIRED = object()


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. All ranks get its path and the same reason."""


def save(
    path: str | os.PathLike[str], state: Any, *, process_set: ProcessSet = global_process_set
) -> None:
    """Write a checkpoint on the first rank. A collective of all ranks of the set.

    The file appears under its name when it is complete, and is on the disk when save() returns. If
    the job is killed before that, the previous file remains.

    Args:
        path: the file; missing folders are made.
        state: tensors, numbers, texts, dates, paths, namespaces, and arrays and scalars of NumPy,
            in Python's containers, such as state dicts, arguments and states of generators. Other
            classes must be registered with ``torch.serialization.add_safe_globals``. Read on the
            first rank only.
        process_set: the ranks that take part; the lowest writes. By default all.

    Raises:
        CheckpointError: on all ranks: the file could not be written, or `load` could not read it;
            names the offending value.
    """
    path = Path(path)
    _on_root(lambda: _write(path, state), f"cannot save the checkpoint {path}", process_set)


def load(
    path: str | os.PathLike[str],
    *,
    default: Any = _REQUIRED,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Read a checkpoint on the first rank and give it to all. A collective of all ranks of the set.

    Only the first rank needs the file. It is read as data: nothing in it is executed
    (``weights_only=True``).

    Args:
        path: the file that `save` wrote.
        default: returned on all ranks if there is no such file; if not given, a missing file is an
            error.
        process_set: the ranks that take part; the lowest reads. By default all.

    Returns:
        The saved state, with all tensors on the CPU.

    Raises:
        CheckpointError: on all ranks: the file is missing or damaged, or holds more than data.
    """
    path = Path(path)
    may_miss = default is not _REQUIRED
    found = _on_root(
        lambda: _read_if_there(path, may_miss), f"cannot load the checkpoint {path}", process_set
    )
    is_there, state = broadcast_nested(found, _root(process_set), process_set)
    return state if is_there else default


def _on_root(call: Callable[[], T], problem: str, process_set: ProcessSet) -> T | None:
    """Return `call()` on the root and None elsewhere; raise its error on all ranks."""
    result, cause, complaint = None, None, ""
    root = _root(process_set)
    if world.rank() == root:
        try:
            result = call()
        except Exception as error:  # of any type: the other ranks wait for the outcome
            cause = error
            complaint = f"{problem}: {type(error).__name__}: {first_line(error)}"
    complaint = broadcast_object(complaint, root, None, process_set)
    if complaint:
        raise CheckpointError(complaint) from cause
    return result


def _root(process_set: ProcessSet) -> int:
    return (process_set.ranks or [0])[0]


def _write(path: Path, state: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            try:
                torch.save(state, file, pickle_module=plain_pickle)
                file.flush()
                _read(unfinished, mmap=True)
            except Exception as error:
                raise (_to_blame(state) or error) from None
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    if sys.platform == "win32":  # a folder cannot be opened there
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is on the disk too
    finally:
        os.close(folder)


def _read(file: Path | BinaryIO, *, mmap: bool = False) -> Any:
    with torch.serialization.safe_globals(plain_pickle.plain_globals()):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def _read_if_there(path: Path, may_miss: bool) -> tuple[bool, Any]:
    """Return whether there is a checkpoint, and its state."""
    try:
        return True, _read(path)
    except FileNotFoundError:
        if may_miss:
            return False, None
        raise


def _to_blame(value: Any, where: str = "state") -> TypeError | None:
    """Return an error that names the innermost value that cannot be saved; None: there is none."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = [*value.items(), *((key, key) for key in value)]
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        found = _to_blame(item, f"{where}[{key!r}]")
        if found is not None:
            return found
    if type(value) in (Tensor, torch.nn.Parameter, dict, OrderedDict, list, tuple):
        return None
    if _comes_back(value):
        return None
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return TypeError(
        f"{where} is {kind}, which no checkpoint takes: save numbers, texts or tensors in its "
        f"place, or let all readers call torch.serialization.add_safe_globals([{kind}])"
    )


def _comes_back(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file, pickle_module=plain_pickle)
        file.seek(0)
        _read(file)
    except Exception:  # of any type: pickle calls the class's own methods
        return False
    return True
